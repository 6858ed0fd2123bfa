"""Attention to chosen keys in Triton against the eager one in float64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from drawloom.kernels.sparse_attention import triton as kernels
from drawloom.kernels.sparse_attention.eager import choose_keys_eager, sparse_attention_eager
from drawloom.kernels.sparse_attention.triton import choose_keys_triton, sparse_attention_triton
from support.kernels import DEVICE, assert_all_close, exact

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=[2**31, 2**17], ids=["one chunk", "chunks"], autouse=True)
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limit chunks to some tokens, or not."""
    monkeypatch.setattr(kernels, "CHUNK_BYTES", request.param)
    monkeypatch.setattr(kernels, "SCORE_BYTES", request.param // 16)
    yield


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype).requires_grad_()


def draw_choice(rows: int, length: int, keys: int, chosen: int) -> Tensor:
    """Return different keys up to each token's own, in any order, and -1 behind them."""
    choice = torch.full((rows, length, chosen), -1, dtype=torch.int32)
    for row in range(rows):
        for token in range(length):
            seen = torch.randperm(token + 1 + keys - length)[:chosen]
            choice[row, token, : len(seen)] = seen
    return choice.to(DEVICE)


def assert_same_gradients(
    actual: Tensor, expected: Tensor, inputs: tuple[Tensor, ...], wide: tuple[Tensor, ...]
) -> None:
    seed = torch.randn_like(actual)
    bound = 4.0 if inputs[0].dtype == torch.bfloat16 else 100.0
    grads = torch.autograd.grad(actual, inputs, seed)
    assert_all_close(grads, torch.autograd.grad(expected, wide, seed.double()), bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("length", "heads", "keys", "chosen", "widths"),
    [(4, 3, 12, 5, (12, 8)), (2, 130, 90, 70, (16, 0)), (4, 2, 12, 5, (128, 9))],
)
def test_attention_equals_eager(
    length: int, heads: int, keys: int, chosen: int, widths: tuple[int, int], dtype: torch.dtype
) -> None:
    """Results, weights and gradients are as in float64, with few and many heads, and with or without wider keys."""
    inputs = draw(2, length, heads, sum(widths), dtype=dtype), draw(2, keys, sum(widths), dtype=dtype)
    choice, wide = draw_choice(2, length, keys, chosen), exact(*inputs)
    mixed, weights = sparse_attention_triton(*inputs, choice, widths[0], 0.3)
    expected, sums = sparse_attention_eager(wide[0], wide[1], choice, widths[0], 0.3)
    bound = 4.0 if dtype == torch.bfloat16 else 100.0
    assert_all_close([mixed, weights.to(dtype)], [expected, sums], bound)
    assert_same_gradients(mixed, expected, inputs, wide)


@pytest.mark.parametrize(("length", "chosen"), [(70, 6), (20, 100), (1, 6)])
def test_choice_equals_eager(length: int, chosen: int) -> None:
    """
    Keys, scores and their gradients are the same in packed rows, for tokens with few and many visible keys, and behind
    cached keys.
    """
    inputs = draw(2, length, 12, 20), draw(2, 70, 20), draw(2, length, 12)
    position = torch.arange(70 - length, 70, dtype=torch.int32, device=DEVICE).expand(2, -1)
    first = torch.where(position < 60, 0, 60).int()
    first[1] = 0
    bounds, wide = (first, position - first + 1, chosen), exact(*inputs)
    choice, scores = choose_keys_triton(*inputs, *bounds)
    expected, expected_scores = choose_keys_eager(wide[0], wide[1], wide[2], *bounds)
    order = [x.sort(-1) for x in (choice, expected)]
    assert torch.equal(order[0].values, order[1].values)
    assert torch.equal((choice < 0).sort(-1).values, choice < 0)
    assert torch.equal(scores == -torch.inf, choice < 0)
    pairs = zip((scores, expected_scores), (choice, expected), order, strict=True)
    actual, wanted = (x.masked_fill(missing < 0, 0.0).gather(-1, own.indices) for x, missing, own in pairs)
    assert_all_close([actual], [wanted], 100.0)
    assert_same_gradients(actual, wanted, inputs, wide)


def test_keys_without_a_token_do_not_count() -> None:
    """A key has no influence if nobody chose it, even if it is first in the row and not a number."""
    inputs = draw(1, 3, 2, 10), draw(1, 3, 10)
    choice = torch.tensor([[[1, -1, -1], [2, -1, -1], [1, 2, -1]]], dtype=torch.int32, device=DEVICE)
    with torch.no_grad():
        inputs[1][0, 0] = torch.nan
    mixed, weights = sparse_attention_triton(*inputs, choice, 8, 0.3)
    for result in (mixed, weights, *torch.autograd.grad(mixed.sum(), inputs)):
        assert result.isfinite().all()


def test_gradients_have_the_same_bits_in_every_run() -> None:
    """A key's gradients are bitwise equal in a second run, also if many tokens chose it."""
    inputs = draw(1, 20, 3, 20, dtype=torch.bfloat16), draw(1, 20, 20, dtype=torch.bfloat16)
    choice = draw_choice(1, 20, 20, 8)
    runs = [torch.autograd.grad(sparse_attention_triton(*inputs, choice, 16, 0.3)[0].sum(), inputs) for _ in range(2)]
    assert all(map(torch.equal, *runs))
