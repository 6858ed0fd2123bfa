"""Attention of whole rows by cuDNN, called past torch's choice of an implementation, beside that choice."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from drawloom.kernels.attention_cudnn import CUDNN, WHOLE_ROWS

pytestmark = pytest.mark.gpu

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def inputs(heads: int, kv_heads: int, head_dim: int, length: int = 300) -> list[Tensor]:
    """Queries, keys and values in bfloat16, (2, length, heads, head_dim)."""
    torch.manual_seed(0)
    drawn = [torch.randn(2, length, count, head_dim, device="cuda") for count in (heads, kv_heads, kv_heads)]
    return [each.bfloat16().requires_grad_() for each in drawn]


def by(backend: SDPBackend) -> Attention:
    """torch's attention, by this implementation alone."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[2] != k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

    return attend


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return CUDNN.attend(q, k, v, WHOLE_ROWS)


def with_gradients(attend: Attention, given: list[Tensor]) -> list[Tensor]:
    """The result and the three gradients."""
    result = attend(*given)
    torch.manual_seed(1)
    seed = torch.randn(result.shape, device="cuda").bfloat16().to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, given, seed)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


SHAPES = pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (8, 2, 128), (6, 1, 64)])


@SHAPES
def test_results_are_cudnns_to_the_bit(heads: int, kv_heads: int, head_dim: int) -> None:
    """With any grouping of heads the result is bitwise cuDNN's; gradients are its own to its order of adding up."""
    given = inputs(heads, kv_heads, head_dim)
    (found, *grads), (expected, *theirs) = (
        with_gradients(each, given) for each in (ours, by(SDPBackend.CUDNN_ATTENTION))
    )
    assert torch.equal(found, expected)
    torch.testing.assert_close(grads, theirs, atol=0.02, rtol=0.02)
    with torch.no_grad():
        assert torch.equal(ours(*given), expected)


@SHAPES
def test_results_are_those_of_math(heads: int, kv_heads: int, head_dim: int) -> None:
    """Results and gradients are those of torch's own arithmetic in float64, to bfloat16's rounding."""
    given = inputs(heads, kv_heads, head_dim)
    wide = [each.detach().double().requires_grad_() for each in given]
    found, expected = with_gradients(ours, given), with_gradients(by(SDPBackend.MATH), wide)
    for one, other, tolerance in zip(found, expected, (0.02, 0.05, 0.05, 0.05), strict=True):
        torch.testing.assert_close(one.double(), other, atol=tolerance, rtol=tolerance)


def test_deterministic_algorithms_take_flash_attention() -> None:
    """Where torch is told to be deterministic, results and gradients are bitwise those of flash attention."""
    given = inputs(4, 2, 64)
    torch.use_deterministic_algorithms(True)
    try:
        assert same(with_gradients(ours, given), with_gradients(by(SDPBackend.FLASH_ATTENTION), given))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 64), (torch.bfloat16, 12)])
def test_what_cudnn_cannot_compute_others_do(dtype: torch.dtype, head_dim: int) -> None:
    """A dtype or a head_dim that cuDNN does not know gives the numbers of torch's own arithmetic."""
    given = [each.detach().to(dtype).requires_grad_() for each in inputs(4, 2, head_dim)]
    found, expected = with_gradients(ours, given), with_gradients(by(SDPBackend.MATH), given)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)
