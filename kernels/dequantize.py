"""
Products with quantized frozen weights: a weight is dequantized where it is used, and again in the backward pass.

At training sizes a product takes far longer than dequantizing its weight, so a bfloat16 matrix product after one pass
over the weight is as fast as a fused kernel. Only the storage is saved for the backward pass, which computes the
input's gradient alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.operation import once_differentiable
from drawloom.kernels.weight_formats import FORMATS, Dequantize, StorageFormat

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function from rows (..., width), a dequantized weight and a bias to rows."""

Gradient = Callable[[Tensor, Tensor], Tensor]
"""Function from gradients (..., outputs) and a dequantized weight to gradients (..., width)."""

GroupedGemm = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""`grouped_gemm_eager`, or another implementation of it."""


def dequantize_eager(stored: Tensor, name: str) -> Tensor:
    """Return the weight, bfloat16 (..., outputs, inputs), with storage (..., outputs, units) in the format `name`."""
    return FORMATS[name].dequantize(stored)


def linear_quantized(
    dequantize: Dequantize, x: Tensor, stored: Tensor, weight_format: StorageFormat, bias: Tensor | None = None
) -> Tensor:
    """
    Return x @ weight.T + bias (..., outputs), in x's dtype: x (..., inputs), the weight's storage (outputs, units).
    """
    return _multiply_by_dequantized_weight(x, stored, weight_format, dequantize, _linear, torch.matmul, bias)


def multiply_quantized_experts(
    dequantize: Dequantize,
    grouped_gemm: GroupedGemm,
    x: Tensor,
    stored: Tensor,
    weight_format: StorageFormat,
    offsets: Tensor,
) -> Tensor:
    """
    Multiply x (rows, inputs), sorted by expert, by the experts' weights, with storage (experts, outputs, units).

    offsets int32 (experts,) are the ends of the experts' rows. Returns (rows, outputs).
    """

    def multiply_rows_by_expert(rows: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
        return grouped_gemm(rows, weight, offsets, True)

    def multiply_grads_by_expert(rows: Tensor, weight: Tensor) -> Tensor:
        return grouped_gemm(rows, weight, offsets, False)

    return _multiply_by_dequantized_weight(
        x, stored, weight_format, dequantize, multiply_rows_by_expert, multiply_grads_by_expert
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = F.linear(x, weight, bias)
    # Callers may not change a view that a Function returns in place.
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


def _multiply_by_dequantized_weight(
    x: Tensor,
    stored: Tensor,
    weight_format: StorageFormat,
    dequantize: Dequantize,
    product: Product,
    gradient: Gradient,
    bias: Tensor | None = None,
) -> Tensor:
    unpack = partial(weight_format.load, dequantize=dequantize)
    result: Tensor = _Product.apply(x, stored, bias, unpack, product, gradient)  # type: ignore[no-untyped-call]
    return result


class _Product(Function):
    """Product with a frozen weight; `gradient` multiplies by the same weight in the other direction."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stored: Tensor,
        bias: Tensor | None,
        unpack: Callable[[Tensor], Tensor],
        product: Product,
        gradient: Gradient,
    ) -> Tensor:
        """Return rows (..., outputs): x (..., inputs), the weight's storage, any shape, and bias (outputs,)."""
        ctx.save_for_backward(stored)
        ctx.unpack, ctx.gradient = unpack, gradient
        return product(x, unpack(stored), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (stored,) = ctx.saved_tensors
        grad_x = ctx.gradient(grad, ctx.unpack(stored)) if ctx.needs_input_grad[0] else None
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, None, None, None
