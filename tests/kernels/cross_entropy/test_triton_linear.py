"""Linear cross entropy in Triton against the eager implementation in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.kernels.cross_entropy import triton as module
from drawloom.kernels.cross_entropy.eager import linear_cross_entropy_eager
from drawloom.kernels.cross_entropy.triton import linear_cross_entropy_triton
from drawloom.kernels.deferral import Deferral
from support.cross_entropy import random_targets
from support.kernels import DEVICE, assert_all_close, draw_tensor, dtypes, exact, few, layouts
from support.seeding import seeds


@pytest.fixture(params=["at once", "in chunks"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep all logits, or compute in chunks, whatever the sizes."""
    if request.param == "in chunks":
        monkeypatch.setattr(module, "MAX_LOGITS", 1)


def losses_of(*inputs: Any, **options: Any) -> Tensor:
    """Return the losses alone."""
    losses, _ = linear_cross_entropy_triton(*inputs, **options)
    return losses


def eager_losses(*inputs: Any, **options: Any) -> Tensor:
    """Return the eager implementation's losses."""
    losses, _ = linear_cross_entropy_eager(*inputs, **options)
    return losses


@few
@given(
    seeds,
    st.lists(st.integers(0, 12), max_size=2),
    st.integers(1, 40),
    st.integers(1, 300),
    dtypes,
    layouts,
    layouts,
    st.booleans(),
    st.sampled_from([1, 2**20]),
)
def test_triton_equals_eager(
    _seed: object,
    shape: list[int],
    width: int,
    words: int,
    dtype: torch.dtype,
    of_hidden: str,
    of_weight: str,
    uniform: bool,
    at_once: int,
) -> None:
    """Any shape and strides agree with float64, with equal or different token factors."""
    hidden = draw_tensor(of_hidden, *shape, width, dtype=dtype)
    weight = draw_tensor(of_weight, words, width, dtype=dtype, scale=width**-0.5)
    targets, wide = random_targets(tuple(shape), words), exact(hidden, weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_LOGITS", at_once)
        actual = losses_of(hidden, weight, targets)
    expected = eager_losses(wide[0], wide[1], targets)
    assert actual.dtype == torch.float32
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), expected, atol=1e-5 + 4 * eps, rtol=1e-5 + eps)
    grad = (torch.rand(()) if uniform else torch.rand(shape)).to(DEVICE).expand(shape)
    grads = torch.autograd.grad(actual, (hidden, weight), grad)
    assert [g.dtype for g in grads] == [dtype, dtype]
    assert_all_close(grads, torch.autograd.grad(expected, wide, grad.double()), 8)


def test_several_chunks_give_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, the last one smaller, over more words than a block, give the result of all tokens."""
    monkeypatch.setattr(module, "MAX_LOGITS", 1)
    monkeypatch.setattr(module, "BLOCK", 64)
    hidden, weight = draw_tensor("contiguous", 150, 8), draw_tensor("contiguous", 200, 8)
    targets, wide = random_targets((150,), 200), exact(hidden, weight)
    actual = losses_of(hidden, weight, targets)
    expected = eager_losses(wide[0], wide[1], targets)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(actual.sum(), (hidden, weight))
    assert_all_close(grads, torch.autograd.grad(expected.sum(), wide), 8)


@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129, 8192])
@pytest.mark.parametrize("at_once", [1, 2**20])
def test_chunks_cover_all_tokens(tokens: int, at_once: int) -> None:
    """Chunks have every token once, none is larger than may exist together, and all but the last are equal."""
    chunks = list(module._split_token_chunks(tokens, 1000, at_once))
    sizes = [len(range(tokens)[chunk]) for chunk in chunks]
    assert [token for chunk in chunks for token in range(tokens)[chunk]] == list(range(tokens))
    assert all(size <= max(128, at_once // 1000) for size in sizes)
    assert len(set(sizes[:-1])) <= 1


@pytest.mark.usefixtures("_way")
def test_ignored_targets_give_0_and_impossible_ones_nan() -> None:
    """An ignored token has loss 0, also with an infinite gradient; a missing target gives NaN."""
    hidden, weight = draw_tensor("contiguous", 3, 8), draw_tensor("contiguous", 10, 8)
    losses = losses_of(hidden, weight, torch.tensor([1, -100, 10], device=DEVICE))
    assert losses[1] == 0
    assert losses.isnan().tolist() == [False, False, True]
    grad = torch.tensor([1.0, float("inf"), 0.0], device=DEVICE)
    (actual,) = torch.autograd.grad(losses, hidden, grad)
    assert (actual[1] == 0).all()


def test_losses_alone_compute_no_gradients() -> None:
    """Losses alone need neither product."""
    hidden, weight, targets = (
        draw_tensor("contiguous", 5, 8),
        draw_tensor("contiguous", 10, 8),
        random_targets((5,), 10),
    )
    with torch.no_grad():
        alone = losses_of(hidden, weight, targets)
    learned = losses_of(hidden, weight, targets)
    assert torch.equal(alone, learned)
    frozen = losses_of(hidden, weight.detach(), targets)
    for losses, sizes in ((alone, []), (learned, [50]), (frozen, [50])):
        node: Any = losses.grad_fn
        assert [x.numel() for x in (node.next_functions[0][0].saved_tensors[-1:] if node else ())] == sizes


def test_small_gradients_reach_the_weight_in_float16() -> None:
    """Token factors at the lower limit for float16 are exact in a sum over tokens."""
    hidden = draw_tensor("contiguous", 128, 8, dtype=torch.float16).detach().abs()
    weight = draw_tensor("contiguous", 10, 8, dtype=torch.float16)
    targets, grad = torch.zeros(128, dtype=torch.int64, device=DEVICE), torch.full((128,), 8e-8, device=DEVICE)
    (actual,) = torch.autograd.grad(losses_of(hidden, weight, targets), weight, grad)
    wide = exact(hidden, weight)
    (expected,) = torch.autograd.grad(eager_losses(wide[0], wide[1], targets), wide[1], grad.double())
    assert (actual[0].double() - expected[0]).norm() < 0.03 * expected[0].norm()


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("uniform", [True, False])
def test_weight_gradient_can_be_deferred(uniform: bool) -> None:
    """A deferred weight gradient is bitwise equal to an immediate one."""
    hidden, weight, targets = (
        draw_tensor("contiguous", 7, 16),
        draw_tensor("contiguous", 20, 16),
        random_targets((7,), 20),
    )
    grad = (torch.rand(()) if uniform else torch.rand(7)).to(DEVICE).expand(7)
    expected = torch.autograd.grad(losses_of(hidden, weight, targets), (hidden, weight), grad)
    deferral = Deferral()
    with deferral:
        losses = losses_of(hidden, weight, targets)
    with deferral.defer():
        actual = torch.autograd.grad(losses, (hidden, weight), grad, allow_unused=True)
    assert actual[1] is None
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(deferral.take_queued_gradients()[0].drain_and_return_remaining_grad(), expected[1])


def test_operators_pass_opcheck() -> None:
    """Both operators pass torch.library.opcheck, which torch.compile relies on."""
    hidden, weight = torch.randn(5, 16, device=DEVICE), torch.randn(20, 16, device=DEVICE)
    targets, factors = random_targets((5,), 20), torch.rand(5, device=DEVICE)
    arguments = hidden, weight, targets, factors, -100, True, True, 2**20
    torch.library.opcheck(torch.ops.drawloom.linear_cross_entropy.default, arguments)
    inputs = hidden, weight, targets, -100, True
    torch.library.opcheck(torch.ops.drawloom.linear_cross_entropy_grad_logits.default, inputs)


@few
@given(
    seeds,
    st.integers(0, 12),
    st.integers(1, 40),
    st.integers(1, 300),
    dtypes,
    st.sampled_from(["both", "lse", "losses"]),
    st.sampled_from([1, 2**20]),
    st.booleans(),
)
def test_gradients_flow_through_losses_and_lse(
    _seed: object, tokens: int, width: int, words: int, dtype: torch.dtype, outputs: str, max_logits: int, weigh: bool
) -> None:
    """With factors on losses and lse, weighted or not, in one chunk or several, gradients equal float64."""
    hidden = draw_tensor("contiguous", tokens, width, dtype=dtype)
    weight = draw_tensor("contiguous", words, width, dtype=dtype, scale=width**-0.5)
    targets, wide = random_targets((tokens,), words), exact(hidden, weight)
    token_weights = torch.rand(tokens, device=DEVICE) if weigh else None
    factors = [torch.rand(tokens, device=DEVICE) for _ in range(2)]
    if outputs != "both":
        factors[outputs == "losses"].zero_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_LOGITS", max_logits)
        actual = linear_cross_entropy_triton(hidden, weight, targets, token_weights=token_weights)
    expected = linear_cross_entropy_eager(wide[0], wide[1], targets, token_weights=token_weights)
    eps = torch.finfo(dtype).eps
    for result, reference in zip(actual, expected, strict=True):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), reference, atol=1e-5 + 4 * eps, rtol=1e-5 + eps)
    chosen = [number for number, name in enumerate(("losses", "lse")) if outputs in (name, "both")]
    grads, exact_grads = (
        torch.autograd.grad([pair[n] for n in chosen], inputs, [factors[n].to(pair[n].dtype) for n in chosen])
        for pair, inputs in ((actual, (hidden, weight)), (expected, wide))
    )
    assert_all_close(grads, exact_grads, 8)


@pytest.mark.usefixtures("_way")
def test_weight_gradient_of_lse_can_be_deferred() -> None:
    """Deferred, the weight's gradient through losses and lse comes later, with the same bits."""
    hidden, weight, targets = (
        draw_tensor("contiguous", 7, 16),
        draw_tensor("contiguous", 20, 16),
        random_targets((7,), 20),
    )
    factors = torch.rand(7, device=DEVICE), torch.rand(7, device=DEVICE)
    expected = torch.autograd.grad(linear_cross_entropy_triton(hidden, weight, targets), (hidden, weight), factors)
    deferral = Deferral()
    with deferral:
        actual = linear_cross_entropy_triton(hidden, weight, targets)
    with deferral.defer():
        grads = torch.autograd.grad(actual, (hidden, weight), factors, allow_unused=True)
    assert grads[1] is None and torch.equal(grads[0], expected[0])
    assert torch.equal(deferral.take_queued_gradients()[0].drain_and_return_remaining_grad(), expected[1])
