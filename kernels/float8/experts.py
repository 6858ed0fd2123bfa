"""
Experts with matrix products in float8: permutation, gate and up, SwiGLU and down as one operation.

Tokens are quantized before they are copied to their experts' rows, and so are their gradients, so that rows exist in
float8 alone. `linear.py` has the dense recipe. Here a weight has one scale by expert, not by output channel, and
therefore multiplies products without a change to the gradient. For a weight's gradient both operands have scales by
row; their product multiplies one of them, relative to the largest in the expert's rows. Scales are powers of two, so
this shifts exponents; only elements 2^15 times smaller than their expert's largest lose bits.

A message with weights has elements in e4m3 and a power-of-two scale per row. A float8 element times its scale is exact
in bfloat16, and quantizing the product by rows again gives the same number, so a layer that multiplies in float8 gets
the weights that it would compute itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.deferred_grads import WeightGradient, compute_at_once_if_hooked, get_weight_gradient_function
from drawloom.kernels.float8.eager import E4M3, Float8Kernels, Float8Rows, ScaledRows, allocate_quantized_experts
from drawloom.kernels.float8.linear import (
    CachedFloat8Weights,
    FactorProduct,
    GradientDispatcher,
    check_float8_operands,
    choose_float8_kernels,
    get_or_quantize_input,
)
from drawloom.kernels.operation import once_differentiable
from drawloom.kernels.recompute.marks import call_recomputable_in_autograd_function
from drawloom.kernels.results import Routes


def experts_float8(
    kernels: Float8Kernels, x: Tensor, probabilities: Tensor, gate_up: Tensor, down: Tensor, routes: Routes
) -> Tensor:
    """
    Return the sum over a token's choices of probability * down(silu(gate(x)) * up(x)), (tokens, width).

    x bfloat16 (..., width), probabilities (tokens, top_k); gate_up (experts, 2 * inner, width), whose first half is
    the gate's, and down (experts, width, inner), both bfloat16.
    """
    return _multiply_by_experts(
        kernels, x, probabilities, gate_up, down, routes.offsets, routes.dest_row, routes.source_choice
    )


def expert_rows_float8(
    kernels: Float8Kernels, rows: Tensor, probabilities: Tensor, gate_up: Tensor, down: Tensor, ends: Tensor
) -> Tensor:
    """
    Compute `experts_float8` for rows (rows, width) sorted by expert, without sums: probabilities (rows,), ends int32
    (experts,); returns (rows, width).
    """
    return _multiply_by_experts(kernels, rows, probabilities, gate_up, down, ends, None, None)


def _multiply_by_experts(
    kernels: Float8Kernels,
    x: Tensor,
    probabilities: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ends: Tensor,
    dest_row: Tensor | None,
    source_choice: Tensor | None,
) -> Tensor:
    for weight in (gate_up, down):
        check_float8_operands(x, weight)
    rows = get_or_quantize_input(kernels, x, False)
    gradients = GradientDispatcher([get_weight_gradient_function(weight) for weight in (gate_up, down)])
    result: Tensor = _ExpertsFloat8.apply(  # type: ignore[no-untyped-call]
        x, probabilities, gate_up, down, gradients, kernels, rows.data, rows.scale, ends, dest_row, source_choice
    )
    return result


class CachedFloat8Experts(CachedFloat8Weights):
    """Quantized experts' weight (experts, outputs, inputs), kept in the same memory from one update to the next."""

    def allocate(self) -> Float8Rows:
        return allocate_quantized_experts(self.weights[0])

    def quantize_into_memory(self, kernels: Any) -> None:
        kernels.quantize_experts_into(self.weights[0], self.rows)


def _get_or_quantize_weight(kernels: Float8Kernels, weight: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize a weight (experts, outputs, inputs), or return the cached elements, scales and transposed copy."""
    kept: CachedFloat8Experts | None = getattr(weight, "float8", None)
    if kept is None:
        return *kernels.quantize_experts(weight), None
    if not kept.is_current:
        kept.quantize_with(kernels)
    return kept.rows


@compute_at_once_if_hooked
class _ExpertsFloat8(Function):
    """Experts; it saves tokens, gate and up's results, and quantized factors."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probabilities: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weight_gradient: WeightGradient,
        kernels: Float8Kernels,
        data: Tensor,
        scale: Tensor,
        ends: Tensor,
        dest_row: Tensor | None,
        source_choice: Tensor | None,
    ) -> Tensor:
        """Return (tokens, width) for quantized x: data (tokens, width), scale (tokens,); without routes, also rows."""
        rows = data, scale, probabilities
        if dest_row is not None and source_choice is not None:
            rows = kernels.copy_tokens_to_expert_rows(
                ScaledRows(data, scale), probabilities, Routes(dest_row, source_choice, ends)
            )
        first, first_scale, first_transposed = _get_or_quantize_weight(kernels, gate_up)
        gate_and_up = kernels.multiply_rows_by_expert(rows[0], rows[1], first, first_scale, ends, True)
        inner = call_recomputable_in_autograd_function(kernels.quantize_expert_swiglu, gate_and_up, rows[2])
        second, second_scale, second_transposed = _get_or_quantize_weight(kernels, down)
        outputs = kernels.multiply_rows_by_expert(inner[0], inner[1], second, second_scale, ends, True)
        ctx.transposed = first_transposed, second_transposed
        ctx.weight_gradient, ctx.kernels, ctx.inputs_shape = weight_gradient, kernels, x.shape
        ctx.save_for_backward(
            *(gate_up, down, first_scale, second_scale, data, rows[1], rows[2], gate_and_up, *inner),
            *(ends, dest_row, source_choice),
        )
        return outputs if dest_row is None else kernels.sum_rows_and_gather_scalars(outputs, None, dest_row)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, down, first_scale, second_scale, data, x_scale, probabilities, *rest = ctx.saved_tensors
        gate_and_up, inner, inner_scale, ends, dest_row, source_choice = rest
        kernels: Float8Kernels = ctx.kernels
        needs_x, needs_probabilities, needs_first, needs_second, *_ = ctx.needs_input_grad
        tokens = ScaledRows(*kernels.quantize_rows(grad.reshape(-1, grad.shape[-1]), transposed=False)[:2])
        rows, top_k = tokens, 1
        if dest_row is not None:
            top_k = max(dest_row.shape[1], 1)
            rows = ScaledRows(
                *kernels.copy_tokens_to_expert_rows(tokens, None, Routes(dest_row, source_choice, ends))[:2]
            )
        transposed = _get_transposed_quantized_weight(kernels, down, second_scale, ctx.transposed[1])
        grad_inner = kernels.multiply_rows_by_expert(*rows, transposed, second_scale, ends, False)
        grad_down = grad_gate_up = grad_x = grad_probabilities = None
        if needs_second:
            left = ScaledRows(inner, inner_scale)
            right = ScaledRows(tokens.data, rows.scale)
            inner_factor, grad_factor, scale = kernels.prepare_outer_product_factors(
                left, right, source_choice, top_k, ends
            )
            product = FactorProduct(kernels.sum_outer_products, 1)
            grad_down = ctx.weight_gradient(product, grad_factor, inner_factor, scale, ends.detach())
            del inner_factor, grad_factor
        del rows
        *quantized, grad_probabilities = kernels.quantize_expert_swiglu_gradient(grad_inner, gate_and_up, probabilities)
        grad_both = ScaledRows(*quantized)
        del grad_inner
        if needs_first:
            right = ScaledRows(data.detach(), x_scale)
            factors = kernels.prepare_outer_product_factors(grad_both, right, source_choice, top_k, ends)
            grad_gate_up = ctx.weight_gradient(FactorProduct(kernels.sum_outer_products, 0), *factors, ends.detach())
            del factors
        if needs_x or (needs_probabilities and dest_row is not None):
            transposed = _get_transposed_quantized_weight(kernels, gate_up, first_scale, ctx.transposed[0])
            grad_x = kernels.multiply_rows_by_expert(*grad_both, transposed, first_scale, ends, False)
            if dest_row is not None:
                grad_x, grad_probabilities = kernels.sum_rows_and_gather_scalars(grad_x, grad_probabilities, dest_row)
            grad_x = grad_x.view(ctx.inputs_shape)
        results = grad_x, grad_probabilities if needs_probabilities else None, grad_gate_up, grad_down
        return *results, *(None,) * 7


def _get_transposed_quantized_weight(
    kernels: Float8Kernels, weight: Tensor, scale: Tensor, kept: Tensor | None
) -> Tensor:
    """Return a quantized weight, transposed (experts, inputs, outputs)."""
    return kernels.quantize_transposed_experts(weight, scale) if kept is None else kept


ALIGNMENT = 16
"""Message sizes in bytes are multiples."""

MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7}
"""Bits below the exponent."""


def pack_weights(weights: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """
    Return a message, uint8 (bytes,), with flat bfloat16 weights (n,).

    Weights with a row width other than 0 are quantized to float8 by rows.
    """
    kernels = choose_float8_kernels(weights[0].device)
    rows = [
        kernels.quantize_rows(weight.view(-1, width), transposed=False)
        for weight, width in zip(weights, widths, strict=True)
        if width
    ]
    plain = [weight.view(torch.uint8) for weight, width in zip(weights, widths, strict=True) if not width]
    exponents = [(part.scale.view(torch.int32) >> MANTISSA_BITS[torch.float32]).to(torch.uint8) for part in rows]
    parts = [*plain, *(part.data.view(torch.uint8).view(-1) for part in rows), *exponents]
    size = sum(map(len, parts))
    return torch.cat([*parts, parts[0].new_zeros(-size % ALIGNMENT)])


def unpack_weights(messages: Tensor, outputs: Sequence[Tensor], widths: Sequence[int]) -> None:
    """
    Fill outputs, bfloat16 (ranks, n), from all ranks' messages, uint8 (ranks, bytes), by `pack_weights` with the same
    `widths`: plain weights (with width 0), then float8 elements, then an exponent byte per row, then padding.
    """
    quantized = [(output, width) for output, width in zip(outputs, widths, strict=True) if width]
    plain = [output for output, width in zip(outputs, widths, strict=True) if not width]
    sizes = [output.shape[1] * output.itemsize for output in plain]
    sizes += [output.shape[1] for output, _ in quantized]
    sizes += [output.shape[1] // width for output, width in quantized]
    parts = iter(torch.split(messages[:, : sum(sizes)], sizes, 1))
    for output in plain:
        output.copy_(next(parts).view(output.dtype))
    element_parts = [next(parts) for _ in quantized]
    for (output, width), elements, exponents in zip(quantized, element_parts, parts, strict=True):
        # A power of two has only an exponent: its bits are the number.
        scale = (exponents.to(torch.int16) << MANTISSA_BITS[torch.bfloat16]).view(torch.bfloat16)
        shape = len(output), -1, width
        torch.mul(elements.view(E4M3).to(torch.bfloat16).view(shape), scale.unsqueeze(2), out=output.view(shape))
