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
from drawloom.kernels.weight_formats import FORMATS, WeightFormat

Dequantize = Callable[[Tensor, str], Tensor]
"""Function from storage (..., outputs, units) and a format's name to the weight, bfloat16 (..., outputs, inputs)."""

Product = Callable[[Tensor, Tensor], Tensor]
"""Function from rows (..., width) and a dequantized weight to rows."""

GroupedGemm = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""`grouped_gemm_eager`, or another implementation of it."""


def dequantize_eager(stored: Tensor, name: str) -> Tensor:
    """Return the weight, bfloat16 (..., outputs, inputs), with storage (..., outputs, units) in the format `name`."""
    return FORMATS[name].dequantize(stored)


def linear_quantized(
    dequantize: Dequantize, x: Tensor, stored: Tensor, weight_format: WeightFormat, bias: Tensor | None = None
) -> Tensor:
    """
    Return x @ weight.T + bias (..., outputs), bfloat16: x (..., inputs), the weight's storage (outputs, units).
    """
    y = _multiply_by_dequantized_weight(x, stored, weight_format, dequantize, _linear, torch.matmul)
    return y if bias is None else y + bias


def multiply_quantized_experts(
    dequantize: Dequantize,
    grouped_gemm: GroupedGemm,
    x: Tensor,
    stored: Tensor,
    weight_format: WeightFormat,
    offsets: Tensor,
) -> Tensor:
    """
    Multiply x (rows, inputs), sorted by expert, by the experts' weights, with storage (experts, outputs, units).

    offsets int32 (experts,) are the ends of the experts' rows. Returns (rows, outputs).
    """

    def multiply(rows: Tensor, weight: Tensor, transposed: bool) -> Tensor:
        return grouped_gemm(rows, weight, offsets, transposed)

    product, gradient = partial(multiply, transposed=True), partial(multiply, transposed=False)
    return _multiply_by_dequantized_weight(x, stored, weight_format, dequantize, product, gradient)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    y = F.linear(x, weight)
    # Callers may not change a view that a Function returns in place.
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


def _multiply_by_dequantized_weight(
    x: Tensor,
    stored: Tensor,
    weight_format: WeightFormat,
    dequantize: Dequantize,
    product: Product,
    gradient: Product,
) -> Tensor:
    def unpack(storage: Tensor) -> Tensor:
        return dequantize(weight_format.fetch(storage), weight_format.name)

    result: Tensor = _Product.apply(x, stored, unpack, product, gradient)  # type: ignore[no-untyped-call]
    return result


class _Product(Function):
    """Product with a frozen weight; `gradient` multiplies by the same weight in the other direction."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, stored: Tensor, unpack: Callable[[Tensor], Tensor], product: Product, gradient: Product
    ) -> Tensor:
        """Return rows (..., outputs): x (..., inputs), and the weight's storage, any shape."""
        ctx.save_for_backward(stored)
        ctx.unpack, ctx.gradient = unpack, gradient
        return product(x, unpack(stored))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (stored,) = ctx.saved_tensors
        grad_x = ctx.gradient(grad, ctx.unpack(stored)) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None, None
