"""Flexible attention against the mask."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drawloom.kernels import attention_flex
from drawloom.kernels.attention import attention_eager
from drawloom.kernels.attention_flex import AttentionFlex, block_mask
from drawloom.kernels.attention_varlen import AttentionVarlen

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.mark.parametrize(
    ("length", "kv_heads", "heads", "often"), [(300, 2, 2, 0.02), (129, 1, 3, 0.5), (64, 2, 4, 0.1)]
)
def test_equals_eager(length: int, kv_heads: int, heads: int, often: float) -> None:
    """With long documents and short, over several blocks or part of one, the result is that of the mask."""
    documents = (torch.rand(2, length) < often).cumsum(1)
    q, k, v = (torch.randn(2, length, count, 8) for count in (heads, kv_heads, kv_heads))
    with torch.no_grad():
        found = AttentionFlex()(q, k, v, documents)
    torch.testing.assert_close(found, attention_eager(q, k, v, documents), atol=1e-5, rtol=1e-5)


def test_numbers_in_any_order() -> None:
    """Documents need not be numbered in their order."""
    documents = torch.tensor([7, 3, 9, 3, 1]).repeat_interleave(60)[None]
    q, k, v = (torch.randn(1, 300, 2, 8) for _ in "qkv")
    with torch.no_grad():
        found = AttentionFlex()(q, k, v, documents)
    torch.testing.assert_close(found, attention_eager(q, k, v, documents), atol=1e-5, rtol=1e-5)


def test_blocks_that_nobody_sees_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three documents of two blocks each: a block sees itself in part, its elder neighbour wholly, and no other."""
    monkeypatch.setattr(attention_flex, "BLOCK", 16)
    mask = block_mask(torch.arange(3).repeat_interleave(32)[None])
    assert mask.kv_num_blocks.flatten().tolist() == [1] * 6
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.flatten().tolist() == [0, 1] * 3


def test_a_mask_is_made_once_for_all_layers() -> None:
    """Calls with the same tensor of documents share its mask; another tensor gets its own."""
    attention = AttentionFlex()
    documents, others = torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None]
    first = attention._mask_of(documents)
    assert attention._mask_of(documents) is first
    assert attention._mask_of(others) is not first


@pytest.mark.parametrize("attention", [AttentionFlex(), AttentionVarlen()])
def test_shapes_alone(attention: Callable[..., Tensor]) -> None:
    """Tensors that are on no device give one of the right shape, with which a pipeline finds out what stages pass."""
    q, k = torch.empty(2, 300, 4, 8, device="meta"), torch.empty(2, 300, 2, 8, device="meta")
    found = attention(q, k, k, torch.empty(2, 300, dtype=torch.int64, device="meta"))
    assert found.is_meta and found.shape == q.shape


@pytest.mark.gpu
def test_small_heads() -> None:
    """Heads for which torch has no kernel are attended to all the same."""
    documents = (torch.rand(2, 300) < 0.02).cumsum(1).cuda()
    q, k, v = (torch.randn(2, 300, 4, 8, device="cuda", requires_grad=True) for _ in "qkv")
    found, expected = AttentionFlex()(q, k, v, documents), attention_eager(q, k, v, documents)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_gradients(kv_heads: int) -> None:
    """Compiled, results and gradients are those of the mask."""
    documents = (torch.rand(2, 300) < 0.02).cumsum(1).cuda()
    q = torch.randn(2, 300, 4, 64, device="cuda", requires_grad=True)
    k, v = (torch.randn(2, 300, kv_heads, 64, device="cuda", requires_grad=True) for _ in "kv")
    found, expected = AttentionFlex()(q, k, v, documents), attention_eager(q, k, v, documents)
    torch.testing.assert_close(found, expected, atol=0.01, rtol=0.01)
    grads = torch.autograd.grad(found.sum(), (q, k, v))
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), (q, k, v)), atol=0.05, rtol=0.02)
