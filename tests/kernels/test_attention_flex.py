"""Flexible attention against the mask."""

import pytest
import torch

from drawloom.kernels.attention import Implementation, attention_eager, visible
from drawloom.kernels.attention_flex import FLEX, _as_booleans, attention_flex, block_mask
from drawloom.kernels.attention_varlen import VARLEN

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.mark.parametrize(
    ("length", "kv_heads", "heads", "often"), [(300, 2, 2, 0.02), (129, 1, 3, 0.5), (64, 2, 4, 0.1)]
)
def test_equals_eager(length: int, kv_heads: int, heads: int, often: float) -> None:
    """With long documents and short, over several blocks or part of one, the result is that of the mask."""
    documents = (torch.rand(2, length) < often).cumsum(1)
    q, k, v = (torch.randn(2, length, count, 8) for count in (heads, kv_heads, kv_heads))
    with torch.no_grad():
        found = attention_flex(q, k, v, block_mask(documents))
    torch.testing.assert_close(found, attention_eager(q, k, v, visible(documents)), atol=1e-5, rtol=1e-5)


def test_numbers_in_any_order() -> None:
    """Documents need not be numbered in their order."""
    documents = torch.tensor([7, 3, 9, 3, 1]).repeat_interleave(60)[None]
    q, k, v = (torch.randn(1, 300, 2, 8) for _ in "qkv")
    with torch.no_grad():
        found = attention_flex(q, k, v, block_mask(documents))
    torch.testing.assert_close(found, attention_eager(q, k, v, visible(documents)), atol=1e-5, rtol=1e-5)


def test_blocks_that_nobody_sees_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three documents of two blocks each: a block sees itself in part, its elder neighbour wholly, and no other."""
    monkeypatch.setattr("drawloom.kernels.attention_flex.BLOCK", 16)
    mask = block_mask(torch.arange(3).repeat_interleave(32)[None])
    assert mask.kv_num_blocks.flatten().tolist() == [1] * 6
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.flatten().tolist() == [0, 1] * 3


@pytest.mark.parametrize("attention", [FLEX, VARLEN], ids=["flex", "varlen"])
def test_shapes_alone(attention: Implementation) -> None:
    """Tensors on the meta device give one of the right shape, with which a pipeline finds out what stages pass."""
    q, k = torch.empty(2, 300, 4, 8, device="meta"), torch.empty(2, 300, 2, 8, device="meta")
    found = attention.attend(q, k, k, attention.mask(torch.empty(2, 300, dtype=torch.int64, device="meta")))
    assert found.is_meta and found.shape == q.shape


def test_masks_are_those_of_the_eager_twin() -> None:
    """Token by token, a mask of blocks says what the eager twin's says."""
    documents = (torch.rand(2, 300) < 0.02).cumsum(1)
    assert torch.equal(_as_booleans(block_mask(documents)), visible(documents))


@pytest.mark.gpu
def test_small_heads() -> None:
    """Heads for which torch has no kernel are attended to all the same."""
    documents = (torch.rand(2, 300) < 0.02).cumsum(1).cuda()
    q, k, v = (torch.randn(2, 300, 4, 8, device="cuda", requires_grad=True) for _ in "qkv")
    found, expected = attention_flex(q, k, v, block_mask(documents)), attention_eager(q, k, v, visible(documents))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_gradients(kv_heads: int) -> None:
    """Compiled, results and gradients are those of the mask."""
    documents = (torch.rand(2, 300) < 0.02).cumsum(1).cuda()
    q = torch.randn(2, 300, 4, 64, device="cuda", requires_grad=True)
    k, v = (torch.randn(2, 300, kv_heads, 64, device="cuda", requires_grad=True) for _ in "kv")
    found, expected = attention_flex(q, k, v, block_mask(documents)), attention_eager(q, k, v, visible(documents))
    torch.testing.assert_close(found, expected, atol=0.01, rtol=0.01)
    grads = torch.autograd.grad(found.sum(), (q, k, v))
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), (q, k, v)), atol=0.05, rtol=0.02)
