"""
Linear layers and gated feed-forward networks with matrix products in float8.

Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv 2209.05433, but with row scales. x (tokens, inputs) and
the weight (outputs, inputs) are rounded once, by rows, for y = x @ weight.T. The backward pass uses the same elements,
although a product can be scaled only along the dimensions it keeps:

- grad_x = (grad * weight_scale) @ weight_elements: weight scales multiply the gradient before rounding;
- grad_weight = (grad * x_scale).T @ x_elements: x scales multiply the rounded gradient, and its columns get their own
  scales. A factor 2^n shifts exponents, so the gradient is rounded once, too; only elements 2^15 times
  smaller than their column's largest lose bits.

Tensor cores multiply float8 along contiguous dimensions, so the backward pass needs transposed copies. A row with a
number that is not finite gets a NaN scale, so the gradient norm is NaN, and nothing is clamped. Only the forward pass
accumulates fast: Hopper's tensor cores keep 14 bits, too few to sum 10,000 tokens.

A feed-forward network is one operation: its gate and up projections are one product, and SwiGLU and its backward pass
write their results in float8 alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.deferred_grads import Addable, Compute, WeightGradient, deferring, weight_gradient_of
from drawloom.kernels.float8 import ALIGNMENT, Float8Kernels, Float8Rows
from drawloom.kernels.operation import once_differentiable
from drawloom.kernels.recompute import cheap, cheap_inside


def linear_float8(kernels: Float8Kernels, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """
    Return x @ weight.T + bias (..., outputs), multiplied in float8: x (..., inputs), weight (outputs, inputs), bias
    (outputs,), all bfloat16; layers with the same tensor x round it once.
    """
    check_operands(x, weight)
    rows = _rows_of(kernels, x, transposed=weight.requires_grad and torch.is_grad_enabled())
    gradient = weight_gradient_of(weight)
    result: Tensor = _LinearFloat8.apply(x, weight, bias, gradient, kernels, *rows)  # type: ignore[no-untyped-call]
    return result


def mlp_float8(kernels: Float8Kernels, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """
    Return (silu(x @ gate.T) * (x @ up.T)) @ down.T (..., outputs), multiplied in float8: x (..., inputs), gate and up
    (width, inputs), down (outputs, width), all bfloat16.
    """
    weights = gate, up, down
    for weight in weights:
        check_operands(x, weight)
    rows = _rows_of(kernels, x, transposed=(gate.requires_grad or up.requires_grad) and torch.is_grad_enabled())
    gradients = _ByWeight([weight_gradient_of(weight) for weight in weights])
    result: Tensor = _MlpFloat8.apply(x, *weights, gradients, kernels, *rows)  # type: ignore[no-untyped-call]
    return result


def check_operands(x: Tensor, weight: Tensor) -> None:
    """Raise TypeError unless operands are bfloat16, and ValueError for unsuitable widths."""
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise TypeError(f"products in float8 round bfloat16 operands, and these are {x.dtype} and {weight.dtype}")
    if any(width % ALIGNMENT for width in weight.shape):
        raise ValueError(f"a weight {tuple(weight.shape)} has a width that is not divisible by {ALIGNMENT}")


@dataclass(frozen=True)
class _Rounded:
    """Rounded rows, and the version their tensor had."""

    rows: Float8Rows
    version: int


def _rows_of(kernels: Float8Kernels, x: Tensor, transposed: bool) -> Float8Rows:
    """Round x (..., width) by rows, and keep the result as long as x lives."""
    if x.is_inference():  # without a version
        return _quantize(kernels, x, transposed)
    known: _Rounded | None = getattr(x, "float8", None)
    if known is None or known.version != x._version or (transposed and not known.rows.transposed.numel()):
        known = _Rounded(Float8Rows(*cheap(_quantize, kernels, x, transposed)), x._version)
        x.float8 = known  # type: ignore[attr-defined]
    return known.rows


def _quantize(kernels: Float8Kernels, x: Tensor, transposed: bool) -> Float8Rows:
    with torch.no_grad():
        return kernels.quantize(x.reshape(-1, x.shape[-1]), transposed)


@deferring
class _LinearFloat8(Function):
    """Linear layer; it saves its input in float8, and can defer its weight gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_gradient: WeightGradient,
        kernels: Float8Kernels,
        data: Tensor,
        scale: Tensor,
        transposed: Tensor,
    ) -> Tensor:
        """Return (..., outputs): x (..., inputs), weight (outputs, inputs), bias (outputs,), and x's `Float8Rows`."""
        elements, weight_scale = kernels.quantize_weights([weight])
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(weight if needs_x else None, weight_scale, scale, transposed if needs_weight else None)
        ctx.weight_gradient, ctx.kernels, ctx.inputs_shape = weight_gradient, kernels, x.shape
        y = kernels.multiply(data, scale, elements, weight_scale, fast=True)
        if bias is not None:
            y += bias
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, weight_scale, x_scale, transposed = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        kernels: Float8Kernels = ctx.kernels
        rows = grad.reshape(-1, grad.shape[-1])
        rounded = kernels.quantize_gradient(rows, weight_scale, x_scale if needs_weight else None)
        grad_x = grad_weight = None
        if needs_x:
            elements = kernels.transpose_weights([weight], weight_scale)
            grad_x = kernels.multiply(rounded.data, rounded.scale, elements, None, fast=False).view(ctx.inputs_shape)
        if needs_weight:
            factors = rounded.columns, rounded.column_scale, transposed.detach()
            grad_weight = ctx.weight_gradient(_WeightGradient(kernels), *factors)
        grad_bias = rows.sum(0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


@dataclass(frozen=True)
class _WeightGradient(Addable):
    """
    Weight gradient: the product e4m3 (outputs, tokens) @ (inputs, tokens).T, times a scale (outputs,).

    `number` is the weight's number among the weights of its operation.
    """

    kernels: Float8Kernels
    number: int = 0

    def __call__(self, grad: Tensor, scale: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.kernels.multiply(grad, scale, x, None, fast=False)

    def in_dtype(self, dtype: torch.dtype, grad: Tensor, scale: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return self(grad, scale, x).to(dtype)

    def add_to(self, summed: Tensor, grad: Tensor, scale: Tensor, x: Tensor) -> None:  # type: ignore[override]
        # In Triton, a fused product and addition took longer than both launches.
        summed += self(grad, scale, x)


@dataclass(frozen=True)
class _ByWeight:
    """Weight gradients of an operation with several weights."""

    gradients: Sequence[WeightGradient]

    def __call__(self, compute: Compute, *tensors: Tensor) -> Tensor | None:
        """Pass a gradient, whose function knows the weight's number, to its weight."""
        assert isinstance(compute, _WeightGradient)
        return self.gradients[compute.number](compute, *tensors)


@deferring
class _MlpFloat8(Function):
    """Gated feed-forward network; it saves the outputs of gate and up, and rounded inputs of products."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        weight_gradient: WeightGradient,
        kernels: Float8Kernels,
        data: Tensor,
        scale: Tensor,
        transposed: Tensor,
    ) -> Tensor:
        """Return (..., outputs) for x (..., inputs), its `Float8Rows`, and weights (outputs, inputs)."""
        _, *needs_weights = ctx.needs_input_grad[:4]
        elements, first_scale = kernels.quantize_weights([gate, up])
        both = kernels.multiply(data, scale, elements, first_scale, fast=True)
        inner = Float8Rows(*cheap_inside(kernels.swiglu, both, needs_weights[2]))
        elements, second_scale = kernels.quantize_weights([down])
        ctx.save_for_backward(
            *(gate, up, down, first_scale, second_scale, both),
            *(scale, transposed if needs_weights[0] or needs_weights[1] else None),
            *(inner.scale, inner.transposed if needs_weights[2] else None),
        )
        ctx.weight_gradient, ctx.kernels, ctx.inputs_shape = weight_gradient, kernels, x.shape
        return kernels.multiply(inner.data, inner.scale, elements, second_scale, fast=True).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, down, first_scale, second_scale, both, x_scale, x, inner_scale, inner = ctx.saved_tensors
        needs_x, needs_gate, needs_up, needs_down = ctx.needs_input_grad[:4]
        kernels: Float8Kernels = ctx.kernels
        rows = grad.reshape(-1, grad.shape[-1])
        outer = kernels.quantize_gradient(rows, second_scale, inner_scale if needs_down else None)
        grads: list[Tensor | None] = [None] * 4
        elements = kernels.transpose_weights([down], second_scale)
        grad_inner = kernels.multiply(outer.data, outer.scale, elements, None, fast=False)
        if needs_down:
            factors = outer.columns, outer.column_scale, inner.detach()
            grads[3] = ctx.weight_gradient(_WeightGradient(kernels, 2), *factors)
        rounded = kernels.swiglu_gradient(grad_inner, both, first_scale, x_scale if needs_gate or needs_up else None)
        if needs_x:
            elements = kernels.transpose_weights([gate, up], first_scale)
            grads[0] = kernels.multiply(rounded.data, rounded.scale, elements, None, fast=False).view(ctx.inputs_shape)
        for number, needs in enumerate((needs_gate, needs_up)):
            if needs:
                part = slice(number * len(gate), (number + 1) * len(gate))
                factors = rounded.columns[part], rounded.column_scale[part], x.detach()
                grads[1 + number] = ctx.weight_gradient(_WeightGradient(kernels, number), *factors)
        return *grads, None, None, None, None, None
