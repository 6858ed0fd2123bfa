"""
Linear layers and gated feed-forward networks with matrix products in float8.

Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv 2209.05433, but with row scales. x (tokens, inputs) and
the weight (outputs, inputs) are quantized once, by rows, for y = x @ weight.T. The backward pass uses the same
elements, although a product can be scaled only along the dimensions it keeps:

- grad_x = (grad * weight_scale) @ weight_elements: weight scales multiply the gradient before quantization;
- grad_weight = (grad * x_scale).T @ x_elements: x scales multiply the quantized gradient, and its columns get their own
  scales. A factor 2^n shifts exponents, so the gradient is quantized once, too; only elements 2^15 times
  smaller than their column's largest lose bits.

Tensor cores multiply float8 along contiguous dimensions, so the backward pass needs transposed copies. A row with a
number that is not finite gets a NaN scale, so the gradient norm is NaN, and nothing is clamped. Only the forward pass
accumulates fast: Hopper's tensor cores keep 14 bits, too few to sum 10,000 tokens.

A feed-forward network is one operation: its gate and up projections are one product, and SwiGLU and its backward pass
write their results in float8 alone.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.availability import why_no_triton
from drawloom.kernels.deferred_grads import (
    Addable,
    Compute,
    WeightGradient,
    compute_at_once_if_hooked,
    get_weight_gradient_function,
)
from drawloom.kernels.float8.eager import (
    ALIGNMENT,
    EAGER,
    Float8Kernels,
    Float8Rows,
    QuantizedGradient,
    allocate_quantized_weights,
    lacks_float8,
)
from drawloom.kernels.operation import once_differentiable
from drawloom.kernels.recompute.marks import (
    call_recomputable,
    call_recomputable_in_autograd_function,
    keep_arguments_in_8_bits,
    record_recomputable_call,
)
from drawloom.kernels.results import NormAndSum

Implementation = Literal["auto", "eager", "triton"]


def choose_float8_kernels(device: torch.device, implementation: Implementation = "auto") -> Float8Kernels:
    """
    Return an implementation: `auto` is Triton on GPUs that have it, and plain torch elsewhere.

    Raises ValueError if Triton is requested and can't run on the device.
    """
    why_not = why_no_triton(device)
    if implementation == "triton" and why_not:
        raise ValueError(why_not)
    if implementation == "eager" or (implementation == "auto" and (device.type == "cpu" or why_not)):
        return EAGER
    from drawloom.kernels.float8.triton import TRITON

    return TRITON


def choose_row_casts(device: torch.device) -> Float8Kernels:
    """Return the implementation for casts alone: plain torch on GPUs without products in float8."""
    return EAGER if lacks_float8(device) else choose_float8_kernels(device)


def linear_float8(kernels: Float8Kernels, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """
    Return x @ weight.T + bias (..., outputs), multiplied in float8: x (..., inputs), weight (outputs, inputs), bias
    (outputs,), all bfloat16; layers with the same tensor x quantize it once.
    """
    return _multiply_by_weights_in_float8(kernels, x, [weight], bias)[0]


def linears_float8(kernels: Float8Kernels, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """
    Return x @ weight.T (..., outputs) for up to three weights (outputs, inputs), multiplied in float8: x (..., inputs),
    all bfloat16. The input's gradient is one product.
    """
    return _multiply_by_weights_in_float8(kernels, x, weights, None)


def _multiply_by_weights_in_float8(
    kernels: Float8Kernels, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None
) -> tuple[Tensor, ...]:
    for weight in weights:
        check_float8_operands(x, weight)
    rows = get_or_quantize_input(kernels, x, _need_gradients(weights))
    gradients = GradientDispatcher([get_weight_gradient_function(weight) for weight in weights])
    result: tuple[Tensor, ...] = _LinearFloat8.apply(x, bias, gradients, kernels, *rows, *weights)  # type: ignore[no-untyped-call]
    return result


def linear_quantized_float8(
    kernels: Float8Kernels,
    dequantize: Callable[[Tensor], Tensor],
    x: Tensor,
    stored: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """
    Return x @ weight.T + bias (..., outputs), multiplied in float8, with a frozen weight: x bfloat16 (..., inputs).

    `dequantize` maps the weight's storage (outputs, units; see `StorageFormat`) to the weight, bfloat16 (outputs,
    inputs).
    """
    rows = get_or_quantize_input(kernels, x, transposed=False)  # a frozen weight has no gradient
    y: Tensor = _FrozenLinearFloat8.apply(x, stored, dequantize, kernels, rows.data, rows.scale)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


def mlp_float8(kernels: Float8Kernels, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """
    Return (silu(x @ gate.T) * (x @ up.T)) @ down.T (..., outputs), multiplied in float8: x (..., inputs), gate and up
    (width, inputs), down (outputs, width), all bfloat16.
    """
    weights = gate, up, down
    for weight in weights:
        check_float8_operands(x, weight)
    rows = get_or_quantize_input(kernels, x, _need_gradients([gate, up]))
    gradients = GradientDispatcher([get_weight_gradient_function(weight) for weight in weights])
    # `Quantized` activation checkpointing may keep gate and up's outputs, saved with this shape, in 8 bits.
    with keep_arguments_in_8_bits(lambda: kernels, shape=(x.shape[:-1].numel(), len(gate) + len(up))):
        result: Tensor = _MlpFloat8.apply(x, *weights, gradients, kernels, *rows)  # type: ignore[no-untyped-call]
    return result


def check_float8_operands(x: Tensor, weight: Tensor) -> None:
    """Raise TypeError unless operands are bfloat16, and ValueError for unsuitable widths."""
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise TypeError(
            f"float8 products need bfloat16 operands, and these are {x.dtype} and {weight.dtype}; cast them to bfloat16"
        )
    if any(width % ALIGNMENT for width in weight.shape[-2:]):
        raise ValueError(f"a weight {tuple(weight.shape)} has a width that is not divisible by {ALIGNMENT}")


@dataclass(frozen=True)
class _AttachedRows:
    """Quantized rows, and the version their tensor had."""

    rows: Float8Rows
    version: int


# Adapters save x for their own gradients; its quantized rows must not live as long. Operations that share an input
# follow each other, but experts quantize an input of their own before a shared expert reads theirs.
_latest: deque[_AttachedRows] = deque(maxlen=2)


def _need_gradients(weights: Sequence[Tensor]) -> bool:
    """Return whether a backward pass will compute a gradient for any of the weights."""
    return torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)


def get_or_quantize_input(kernels: Float8Kernels, x: Tensor, transposed: bool) -> Float8Rows:
    """
    Return x (..., width) quantized by rows, with or without a transposed copy.

    Rows attached to x are reused while x is unchanged and `_latest` keeps them.
    """
    if x.is_inference():  # without a version
        return _quantize_rows(kernels, x, transposed)
    attached: _AttachedRows | None = _get_attached_rows(x)
    if attached is None or attached.version != x._version:
        return attach_quantized_rows(x, Float8Rows(*call_recomputable(_quantize_rows, kernels, x, transposed)))
    if not transposed or attached.rows.transposed.numel():
        return attached.rows
    rows = attached.rows._replace(transposed=kernels.transpose(attached.rows.data))
    # Recomputation starts from x, so the rows without a transposed copy need not be kept for it.
    record_recomputable_call(tuple(rows), _quantize_rows, kernels, x, True)
    return attach_quantized_rows(x, rows)


def _get_attached_rows(x: Tensor) -> _AttachedRows | None:
    reference: ref[_AttachedRows] | None = getattr(x, "float8", None)
    return reference() if reference is not None else None


def attach_quantized_rows(x: Tensor, rows: Float8Rows) -> Float8Rows:
    """Attach quantized rows to x (..., width) for its next operations in float8, and return them."""
    if not x.is_inference():  # without a version
        quantized = _AttachedRows(rows, x._version)
        _latest.append(quantized)
        x.float8 = ref(quantized)  # type: ignore[attr-defined]
    return rows


def _quantize_rows(kernels: Float8Kernels, x: Tensor, transposed: bool) -> Float8Rows:
    with torch.no_grad():
        return kernels.quantize_rows(x.reshape(-1, x.shape[-1]), transposed)


class CachedFloat8Weights:
    """An operation's quantized weights, kept in the same memory from one update to the next."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """Allocate memory for an operation's weights (outputs, inputs); the first weight refers to it."""
        self.weights = weights
        self.rows = self.allocate()
        self._kernels: Float8Kernels | None = None
        self._versions: list[int] = []
        weights[0].float8 = self  # type: ignore[attr-defined]

    def allocate(self) -> Float8Rows:
        """Allocate memory for the quantized weights."""
        return allocate_quantized_weights(self.weights)

    def quantize_into_memory(self, kernels: Any) -> None:
        """Quantize the weights into their memory."""
        kernels.quantize_weights_into(self.weights, self.rows)

    @property
    def is_current(self) -> bool:
        """Whether no weight has a new version; torch's fused optimizers and ours give weights none."""
        return self._versions == [weight._version for weight in self.weights]

    def quantize_with(self, kernels: Float8Kernels) -> None:
        """Quantize the weights now, and remember the kernels for `requantize`."""
        self._kernels = kernels
        self.requantize()

    def requantize(self) -> None:
        """Quantize the weights after an update; before their first use, do nothing."""
        if self._kernels is not None:
            with torch.no_grad():
                self.quantize_into_memory(self._kernels)
            self._versions = [weight._version for weight in self.weights]


def _get_or_quantize_weights(kernels: Float8Kernels, weights: Sequence[Tensor]) -> Float8Rows:
    """Return an operation's weights (outputs, inputs) in float8 with a transposed copy: cached, or quantized now."""
    kept: CachedFloat8Weights | None = getattr(weights[0], "float8", None)
    if kept is None or [*map(id, kept.weights)] != [*map(id, weights)]:
        elements, scale = kernels.quantize_weights(weights)
        return Float8Rows(elements, scale, elements.new_empty(0))
    if not kept.is_current:
        kept.quantize_with(kernels)
    return kept.rows


def _get_transposed_quantized_weights(
    kernels: Float8Kernels, weights: Sequence[Tensor], scale: Tensor, kept: Tensor
) -> Tensor:
    """Return quantized weights, transposed (inputs, all outputs)."""
    return kept if kept.numel() else kernels.quantize_transposed_weights(weights, scale)


@compute_at_once_if_hooked
class _LinearFloat8(Function):
    """Linear layers with one input; they save it in float8, and can defer their weight gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        weight_gradient: WeightGradient,
        kernels: Float8Kernels,
        data: Tensor,
        scale: Tensor,
        transposed: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return (..., outputs) by weight: x (..., inputs), its `Float8Rows`, bias (outputs,) for a single weight."""
        elements, weight_scale, ctx.transposed = _get_or_quantize_weights(kernels, weights)
        ctx.needs_weights = ctx.needs_input_grad[-len(weights) :]
        ctx.save_for_backward(weight_scale, scale, transposed if any(ctx.needs_weights) else None, *weights)
        ctx.weight_gradient, ctx.kernels, ctx.inputs_shape = weight_gradient, kernels, x.shape
        sizes = [*map(len, weights)]
        parts = zip(torch.split(elements, sizes), torch.split(weight_scale, sizes), strict=True)
        results = [kernels.multiply_scaled(data, scale, *part, fast=True) for part in parts]
        if bias is not None:
            results[0] += bias
        return tuple(result.view(*x.shape[:-1], -1) for result in results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight_scale, x_scale, x, *weights = ctx.saved_tensors
        kernels: Float8Kernels = ctx.kernels
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        quantized = kernels.quantize_gradient(rows, weight_scale, x_scale if any(ctx.needs_weights) else None)
        grad_x = None
        if ctx.needs_input_grad[0]:
            elements = _get_transposed_quantized_weights(kernels, weights, weight_scale, ctx.transposed)
            grad_x = kernels.multiply_scaled(quantized.data, quantized.scale, elements, None, fast=False).view(
                ctx.inputs_shape
            )
        grad_weights = _compute_or_defer_weight_gradients(ctx, quantized, x, weights)
        grad_bias = rows[0].sum(0) if ctx.needs_input_grad[1] else None
        return grad_x, grad_bias, None, None, None, None, None, *grad_weights


class _FrozenLinearFloat8(Function):
    """Linear layer with a frozen weight, dequantized and quantized in every pass; it saves the storage."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stored: Tensor,
        dequantize: Callable[[Tensor], Tensor],
        kernels: Float8Kernels,
        data: Tensor,
        scale: Tensor,
    ) -> Tensor:
        """Return (..., outputs) for quantized x: data (tokens, inputs), scale (tokens,)."""
        weight = dequantize(stored)
        check_float8_operands(x, weight)
        elements, weight_scale = kernels.quantize_weights([weight])
        ctx.save_for_backward(stored, weight_scale)
        ctx.dequantize, ctx.kernels, ctx.inputs_shape = dequantize, kernels, x.shape
        return kernels.multiply_scaled(data, scale, elements, weight_scale, fast=True).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        stored, weight_scale = ctx.saved_tensors
        kernels: Float8Kernels = ctx.kernels
        quantized = kernels.quantize_gradient([grad.reshape(-1, grad.shape[-1])], weight_scale, None)
        elements = kernels.quantize_transposed_weights([ctx.dequantize(stored)], weight_scale)
        grad_x = kernels.multiply_scaled(quantized.data, quantized.scale, elements, None, fast=False).view(
            ctx.inputs_shape
        )
        return grad_x, None, None, None, None, None


def _compute_or_defer_weight_gradients(
    ctx: Any, quantized: QuantizedGradient, x: Tensor, weights: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return gradients for weights (outputs, inputs) with the transposed input x, or defer them."""
    results: list[Tensor | None] = []
    first = 0
    for number, weight in enumerate(weights):
        part = slice(first, first + len(weight))
        first = part.stop
        if not ctx.needs_weights[number]:
            results.append(None)
            continue
        factors = quantized.columns[part], quantized.column_scale[part], x.detach()
        results.append(ctx.weight_gradient(FactorProduct(partial(_multiply_factors, ctx.kernels), number), *factors))
    return results


def _multiply_factors(kernels: Float8Kernels, grad: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """Return the product e4m3 (outputs, tokens) @ (inputs, tokens).T, times a scale (outputs,)."""
    return kernels.multiply_scaled(grad, scale, x, None, fast=False)


@dataclass(frozen=True)
class FactorProduct(Addable):
    """Weight gradient: a product of float8 factors; `number` is the weight's number among its operation's weights."""

    product: Callable[..., Tensor]
    number: int = 0

    def __call__(self, *tensors: Tensor) -> Tensor:
        return self.product(*tensors)

    def compute_in_dtype(self, dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        return self(*tensors).to(dtype)

    def add_to(self, summed: Tensor, *tensors: Tensor) -> None:
        # In Triton, a fused product and addition took longer than both launches.
        summed += self(*tensors)


@dataclass(frozen=True)
class GradientDispatcher:
    """Callable for an operation with several weights: passes a computed gradient to its weight's WeightGradient."""

    gradients: Sequence[WeightGradient]

    def __call__(self, compute: Compute, *tensors: Tensor) -> Tensor | None:
        """Pass a gradient, whose function knows the weight's number, to its weight."""
        assert isinstance(compute, FactorProduct)
        return self.gradients[compute.number](compute, *tensors)


@compute_at_once_if_hooked
class _MlpFloat8(Function):
    """Gated feed-forward network; it saves the outputs from gate and up, and quantized factors."""

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
        ctx.needs_weights = ctx.needs_input_grad[1:4]
        *needs_first, needs_down = ctx.needs_weights
        elements, first_scale, first_transposed = _get_or_quantize_weights(kernels, [gate, up])
        gate_and_up = kernels.multiply_scaled(data, scale, elements, first_scale, fast=True)
        inner = Float8Rows(*call_recomputable_in_autograd_function(kernels.quantize_swiglu, gate_and_up, needs_down))
        elements, second_scale, second_transposed = _get_or_quantize_weights(kernels, [down])
        ctx.transposed = first_transposed, second_transposed
        ctx.save_for_backward(
            *(gate, up, down, first_scale, second_scale, gate_and_up, scale, transposed if any(needs_first) else None),
            *(inner.scale, inner.transposed if needs_down else None),
        )
        ctx.weight_gradient, ctx.kernels, ctx.inputs_shape = weight_gradient, kernels, x.shape
        return kernels.multiply_scaled(inner.data, inner.scale, elements, second_scale, fast=True).view(
            *x.shape[:-1], -1
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, _, first_scale, _, gate_and_up, x_scale, x, _, _ = ctx.saved_tensors
        kernels: Float8Kernels = ctx.kernels
        grad_inner, grad_down = _compute_down_projection_gradients(ctx, grad)
        needs_x_scale = ctx.needs_weights[0] or ctx.needs_weights[1]
        quantized = kernels.quantize_swiglu_gradient(
            grad_inner, gate_and_up, first_scale, x_scale if needs_x_scale else None
        )
        del grad_inner  # as large as the products that follow
        grad_x = None
        if ctx.needs_input_grad[0]:
            elements = _get_transposed_quantized_weights(kernels, [gate, up], first_scale, ctx.transposed[0])
            grad_x = kernels.multiply_scaled(quantized.data, quantized.scale, elements, None, fast=False).view(
                ctx.inputs_shape
            )
            del elements
        return (
            grad_x,
            *_compute_or_defer_weight_gradients(ctx, quantized, x, [gate, up]),
            grad_down,
            None,
            None,
            None,
            None,
            None,
        )


def _compute_down_projection_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return gradients for the down projection's input (tokens, width) and weight."""
    _, _, down, _, scale, _, _, _, inner_scale, inner = ctx.saved_tensors
    kernels: Float8Kernels = ctx.kernels
    needs_down = ctx.needs_weights[2]
    quantized = kernels.quantize_gradient(
        [grad.reshape(-1, grad.shape[-1])], scale, inner_scale if needs_down else None
    )
    elements = _get_transposed_quantized_weights(kernels, [down], scale, ctx.transposed[1])
    grad_inner = kernels.multiply_scaled(quantized.data, quantized.scale, elements, None, fast=False)
    if not needs_down:
        return grad_inner, None
    factors = quantized.columns, quantized.column_scale, inner.detach()
    return grad_inner, ctx.weight_gradient(FactorProduct(partial(_multiply_factors, kernels), 2), *factors)


def rms_norm_float8(
    kernels: Float8Kernels, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
) -> NormAndSum:
    """
    Return x + residual, normed, and the sum, both (..., width); products in float8 find the norm's rounded rows.

    Without a residual, the sum is x. `weight` is (width,); if `zero_centered`, the factor is 1 + weight.
    """
    with keep_arguments_in_8_bits(lambda: kernels, x):
        normed, summed, rows = kernels.norm_and_quantize(x, residual, weight, eps, zero_centered)
        attach_quantized_rows(normed, rows)
        # Recomputation starts from the sum, which is saved anyway, not from its terms.
        record_recomputable_call(normed, kernels.norm, summed, weight, eps, zero_centered)
    return NormAndSum(normed, summed)
