"""Attention for whole rows by direct calls of cuDNN, compared with torch's implementations."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from drawloom.kernels.attention.cudnn import CUDNN, ONE_DOCUMENT_PER_ROW
from drawloom.kernels.attention.pieces import RowPieces
from support.row_pieces import ImaginaryRanks

pytestmark = pytest.mark.gpu

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def inputs(heads: int, kv_heads: int, head_dim: int, length: int = 300) -> list[Tensor]:
    """Return random queries, keys and values in bfloat16, (2, length, heads, head_dim)."""
    torch.manual_seed(0)
    drawn = [torch.randn(2, length, count, head_dim, device="cuda") for count in (heads, kv_heads, kv_heads)]
    return [tensor.bfloat16().requires_grad_() for tensor in drawn]


def attention_by(backend: SDPBackend) -> Attention:
    """Return torch's attention by one backend."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[2] != k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

    return attend


def attend_by_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return CUDNN.attend(q, k, v, ONE_DOCUMENT_PER_ROW)


def compute_gradients(attend: Attention, tensors: list[Tensor]) -> list[Tensor]:
    """Return the result and the three gradients."""
    result = attend(*tensors)
    torch.manual_seed(1)
    seed = torch.randn(result.shape, device="cuda").bfloat16().to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, tensors, seed)]


def are_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


SHAPES = pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (8, 2, 128), (6, 1, 64)])


@SHAPES
def test_results_equal_cudnn_bitwise(heads: int, kv_heads: int, head_dim: int) -> None:
    """The result is bitwise cuDNN's for any grouping of heads; gradients agree up to the order of summation."""
    tensors = inputs(heads, kv_heads, head_dim)
    (result, *grads), (expected, *cudnn_grads) = (
        compute_gradients(attend, tensors) for attend in (attend_by_cudnn, attention_by(SDPBackend.CUDNN_ATTENTION))
    )
    assert torch.equal(result, expected)
    torch.testing.assert_close(grads, cudnn_grads, atol=0.02, rtol=0.02)
    with torch.no_grad():
        assert torch.equal(attend_by_cudnn(*tensors), expected)


@SHAPES
def test_results_match_float64_arithmetic(heads: int, kv_heads: int, head_dim: int) -> None:
    """Results and gradients equal torch's float64 arithmetic to bfloat16's rounding."""
    tensors = inputs(heads, kv_heads, head_dim)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    results, expected = (
        compute_gradients(attend_by_cudnn, tensors),
        compute_gradients(attention_by(SDPBackend.MATH), wide),
    )
    for result, exact, tolerance in zip(results, expected, (0.02, 0.05, 0.05, 0.05), strict=True):
        torch.testing.assert_close(result.double(), exact, atol=tolerance, rtol=tolerance)


@SHAPES
@pytest.mark.parametrize("indices", [(0, 3), (1, 2)])
def test_pieces_of_rows_match_whole_rows(heads: int, kv_heads: int, head_dim: int, indices: tuple[int, ...]) -> None:
    """Pieces have the results and gradients of their tokens in whole rows, to bfloat16's rounding."""
    q, k, v = (tensor.detach() for tensor in inputs(heads, kv_heads, head_dim, 4 * 128))
    exchange = ImaginaryRanks(indices, 4, torch.cat([k.flatten(2), v.flatten(2)], 2))
    own = exchange.token_indices
    parts = [tensor[:, own].requires_grad_() for tensor in (q, k, v)]
    actual = compute_gradients(lambda q, k, v: CUDNN.attend(q, k, v, RowPieces(exchange)), parts)
    wide = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected = compute_gradients(lambda q, k, v: attention_by(SDPBackend.MATH)(q, k, v)[:, own], wide)
    sent = torch.cat([grad[:, exchange.others].flatten(2) for grad in expected[2:]], 2)
    expected[1:] = [grad[:, own] for grad in expected[1:]]
    tolerances = (0.02, 0.05, 0.05, 0.05, 0.05)
    for tensor, exact, tolerance in zip([*actual, exchange.sent], [*expected, sent], tolerances, strict=True):
        torch.testing.assert_close(tensor.double(), exact, atol=tolerance, rtol=tolerance)


def test_deterministic_algorithms_use_flash_attention() -> None:
    """With deterministic algorithms, results and gradients equal flash attention bitwise."""
    tensors = inputs(4, 2, 64)
    torch.use_deterministic_algorithms(True)
    try:
        assert are_equal(
            compute_gradients(attend_by_cudnn, tensors),
            compute_gradients(attention_by(SDPBackend.FLASH_ATTENTION), tensors),
        )
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 64), (torch.bfloat16, 12)])
def test_unsupported_inputs_fall_back_to_other_backends(dtype: torch.dtype, head_dim: int) -> None:
    """With a dtype or head_dim that cuDNN does not support, results match torch's arithmetic."""
    tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs(4, 2, head_dim)]
    results, expected = (
        compute_gradients(attend_by_cudnn, tensors),
        compute_gradients(attention_by(SDPBackend.MATH), tensors),
    )
    torch.testing.assert_close(results, expected, atol=0.05, rtol=0.05)
