"""
Float8: casts to e4m3 elements with a power-of-two scale per row, and products of such matrices.

`linear.py` explains the recipe. A row with a number that is not finite gets a NaN scale, and nothing is clamped. Rows
of experts are sorted by expert, see `experts.py`; rows past the last end may hold any values, in inputs and results,
and contribute to no weight's gradient.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drawloom.kernels.gates.eager import compute_swiglu_gradients, swiglu_eager, swiglu_halves_eager
from drawloom.kernels.grouped_gemm.eager import grouped_gemm_eager
from drawloom.kernels.moe.eager import gather_rows_by_choice
from drawloom.kernels.operation import upcast
from drawloom.kernels.results import Routes
from drawloom.kernels.rms_norm.eager import rms_norm_eager

E4M3 = torch.float8_e4m3fn
ALIGNMENT = 16
"""Both widths in a product must be multiples."""

MIN_CAPABILITY = (8, 9)
"""Minimum compute capability for float8 products: Ada; Hopper has 9.0."""

SCALE_BIAS = 8
"""Exponent in the largest e4m3 number: for a row maximum m * 2^e, the scale is 2^(e - 8) or 2^(e - 7)."""

ROUND_UP = 0x1FFFFF
"""Added to float32 bits, it carries into the exponent if the mantissa is above 1.75, as in 448."""

MIN_SCALE_EXPONENT = 27
"""Smallest biased exponent for a scale, 2^-100: a row with zeros gets it, and its inverse is finite."""


def lacks_float8(device: torch.device) -> bool:
    """Return whether a device is a GPU without float8; a plan for another machine's GPU assumes float8."""
    is_here = device.type == "cuda" and torch.cuda.is_available()
    return is_here and torch.cuda.get_device_capability(device) < MIN_CAPABILITY


class ScaledRows(NamedTuple):
    """Quantized rows: `data` e4m3 (rows, width) times `scale` float32 (rows,), or (experts,) for experts' matrices."""

    data: Tensor
    scale: Tensor


class Float8Rows(NamedTuple):
    """
    Quantized rows: `data` e4m3 (rows, width) times `scale` float32 (rows,).

    `transposed` is data.T, e4m3 (width, padded rows), padded with zeros to a multiple; it is empty if not requested.
    """

    data: Tensor
    scale: Tensor
    transposed: Tensor


class NormedRows(NamedTuple):
    """A norm and its input, both (..., width), and the norm's quantized rows, without a copy."""

    normed: Tensor
    summed: Tensor
    rows: Float8Rows


class QuantizedGradient(NamedTuple):
    """
    Quantized gradient: by rows, `data` (tokens, outputs) times `scale` (tokens,), and transposed, `columns` (outputs,
    padded tokens) times `column_scale` (outputs,); the last two are empty if they were not requested.
    """

    data: Tensor
    scale: Tensor
    columns: Tensor
    column_scale: Tensor


def compute_power_of_two_scales(largest: Tensor) -> Tensor:
    """
    Return power-of-two divisors for rows with these largest magnitudes, float32 (rows,).

    Quotients are at most 448, e4m3's largest number, so none is clamped. NaN if the magnitude is not finite.
    """
    exponent = ((largest.view(torch.int32) + ROUND_UP) >> 23) - SCALE_BIAS
    scale = (exponent.clamp_min(MIN_SCALE_EXPONENT) << 23).view(torch.float32)
    return scale.masked_fill(~largest.isfinite(), torch.nan)


def allocate_quantized_weights(weights: Sequence[Tensor]) -> Float8Rows:
    """Allocate float8 rows for weights (outputs, inputs), concatenated along outputs, and a transposed copy."""
    outputs, inputs = sum(map(len, weights)), weights[0].shape[1]
    data, transposed = (weights[0].new_empty(shape, dtype=E4M3) for shape in ((outputs, inputs), (inputs, outputs)))
    return Float8Rows(data, weights[0].new_empty(outputs, dtype=torch.float32), transposed)


def compute_padded_row_count(rows: int) -> int:
    """Return a row count, rounded up to the alignment of transposed copies."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


def _transpose_rows(data: Tensor) -> Tensor:
    """Transpose e4m3 (rows, width) to (width, padded rows)."""
    result = data.new_zeros(data.shape[1], compute_padded_row_count(len(data)))
    result[:, : len(data)] = data.t()
    return result


GROUP = 128
"""Multiple to which every expert's columns in a transposed copy are padded: tensor cores multiply along rows."""

MIN_SCALE = 2.0**-100
"""Smallest scale for an expert's gradient, whose inverse is finite."""


class ExpertRows(NamedTuple):
    """
    Quantized rows: `data` e4m3 (rows, width) times `scale` float32 (rows,).

    `probabilities` (rows,) are their choices', or empty if they were not requested.
    """

    data: Tensor
    scale: Tensor
    probabilities: Tensor


class QuantizedSwigluGradient(NamedTuple):
    """
    Quantized gradient of gate and up: `data` e4m3 (rows, 2 * width) times `scale` float32 (rows,), and the gradients of
    probabilities (rows,).
    """

    data: Tensor
    scale: Tensor
    grad_probabilities: Tensor


class GroupedFactors(NamedTuple):
    """
    Factors for a weight's gradient by expert: left @ right.T over an expert's columns, times its scale.

    `left` e4m3 (outputs, columns), `right` e4m3 (inputs, columns), `scale` float32 (experts,). An expert's columns are
    its rows, padded with zeros to a multiple of GROUP; there are `count_padded_columns` columns in total.
    """

    left: Tensor
    right: Tensor
    scale: Tensor


def count_padded_columns(rows: int, experts: int) -> int:
    """Return the columns in transposed copies, with at most GROUP - 1 padded columns by expert."""
    return (rows // GROUP + experts) * GROUP


def allocate_quantized_experts(weight: Tensor) -> Float8Rows:
    """Return memory for a quantized weight (experts, outputs, inputs), scales by expert, and its transposed copy."""
    experts, outputs, inputs = weight.shape
    data, transposed = (
        weight.new_empty(shape, dtype=E4M3) for shape in ((experts, outputs, inputs), (experts, inputs, outputs))
    )
    return Float8Rows(data, weight.new_empty(experts, dtype=torch.float32), transposed)


def _compute_padded_ends(ends: Tensor) -> Tensor:
    """Return the columns' ends by expert."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    return ((counts + GROUP - 1) // GROUP * GROUP).cumsum(0).to(ends.dtype)


def _compute_begins(ends: Tensor) -> Tensor:
    """Return the first row or column by expert, given the ends."""
    return ends.roll(1).index_fill(0, ends.new_zeros(1).long(), 0)


def _select_float8_rows(data: Tensor, rows: Tensor) -> Tensor:
    """Return e4m3 rows (n, width); torch does not index float8 on a CPU."""
    return data.view(torch.uint8)[rows].view(E4M3)


def _transpose_rows_into_columns(rows: Tensor, column: Tensor, columns: int) -> Tensor:
    """Return e4m3 (rows, width) as (width, columns), with row i at column[i]; column `columns` is dropped."""
    result = rows.new_zeros(columns + 1, rows.shape[1]).view(torch.uint8)
    return result.index_copy(0, column, rows.view(torch.uint8))[:columns].t().contiguous().view(E4M3)


class Float8Kernels:
    """
    Casts and products in float8, here in plain torch, with operands widened to float32; Triton's class derives from it.

    All matrices have contiguous rows, and all scales are float32. `ends` are the ends of experts' rows, int32
    (experts,).
    """

    def quantize_rows(self, x: Tensor, transposed: bool) -> Float8Rows:
        """Quantize x (rows, width) by rows, with or without a transposed copy."""
        wide = x.float()
        scale = compute_power_of_two_scales(wide.abs().amax(1))
        data = (wide / scale[:, None]).to(E4M3)
        return Float8Rows(data, scale, _transpose_rows(data) if transposed else data.new_empty(0))

    def dequantize_rows(self, data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return data * scale[:, None] in a dtype: data (rows, width), scale (rows,); exact but in float16."""
        return data.to(dtype).mul_(scale[:, None])

    def transpose(self, data: Tensor) -> Tensor:
        """Transpose e4m3 (rows, width) to (width, padded rows)."""
        return _transpose_rows(data)

    def quantize_weights(self, weights: Sequence[Tensor]) -> ScaledRows:
        """Quantize weights (outputs, inputs) by rows: data (all outputs, inputs) and scale (all outputs,)."""
        rows = self.quantize_rows(torch.cat([*weights]), transposed=False)
        return ScaledRows(rows.data, rows.scale)

    def quantize_transposed_weights(self, weights: Sequence[Tensor], scale: Tensor) -> Tensor:
        """Quantize weights (outputs, inputs) with scales (all outputs,): e4m3 (inputs, all outputs)."""
        return _transpose_rows((torch.cat([*weights]).float() / scale[:, None]).to(E4M3))

    def quantize_weights_into(self, weights: Sequence[Tensor], rows: Float8Rows) -> None:
        """Fill `rows` with the elements, scales and transposed copy of weights (outputs, inputs)."""
        for target, source in zip(rows, self.quantize_rows(torch.cat([*weights]), transposed=True), strict=True):
            target.copy_(source)

    def quantize_swiglu(self, gate_and_up: Tensor, transposed: bool) -> Float8Rows:
        """Quantize silu(gate) * up by rows, where gate and up are halves: `gate_and_up` (rows, 2 * width)."""
        return self.quantize_rows(swiglu_halves_eager(gate_and_up.float()), transposed)

    def quantize_swiglu_gradient(
        self, grad: Tensor, gate_and_up: Tensor, factor: Tensor, row_scale: Tensor | None
    ) -> QuantizedGradient:
        """
        Quantize `gate_and_up`'s gradient like `quantize_gradient`: grad (tokens, width) is for silu(gate) * up, and
        factor (2 * width,).
        """
        gate, up = gate_and_up.float().chunk(2, -1)
        return self.quantize_gradient(compute_swiglu_gradients(grad, gate, up), factor, row_scale)

    def quantize_gradient(self, grads: Sequence[Tensor], factor: Tensor, row_scale: Tensor | None) -> QuantizedGradient:
        """
        Quantize grad * factor by rows: up to three gradients (tokens, outputs) side by side, factor (all outputs,).

        With row_scale (tokens,), also quantize grad * row_scale[:, None] by columns.
        """
        data, scale, _ = self.quantize_rows(torch.cat([*grads], 1).float() * factor, transposed=False)
        if row_scale is None:
            return QuantizedGradient(data, scale, data.new_empty(0, 0), scale.new_empty(0))
        # The columns' scales divide by the factor, which the rows contain.
        shifted = data.float() * (scale * row_scale)[:, None]
        column_scale = compute_power_of_two_scales(shifted.abs().amax(0))
        return QuantizedGradient(data, scale, _transpose_rows((shifted / column_scale).to(E4M3)), column_scale / factor)

    def norm(self, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        """Apply RMSNorm to x (..., width), times the weight (width,), or times 1 + weight."""
        return rms_norm_eager(x, weight, eps, zero_centered)

    def norm_and_quantize(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
    ) -> NormedRows:
        """Apply `norm` to x + residual, or to x, and quantize it by rows."""
        summed = x if residual is None else (x + residual).to(x.dtype)
        normed = self.norm(summed, weight, eps, zero_centered)
        return NormedRows(normed, summed, self.quantize_rows(normed.detach().flatten(0, -2), transposed=False))

    def multiply_scaled(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor | None, fast: bool) -> Tensor:
        """
        Return a @ b.T, bfloat16 (rows, columns), times a_scale (rows,) and b_scale (columns,): a (rows, inner),
        b (columns, inner).
        """
        product = a.float() @ b.float().t() * a_scale[:, None]
        return (product if b_scale is None else product * b_scale).bfloat16()

    def copy_tokens_to_expert_rows(self, rows: ScaledRows, probabilities: Tensor | None, routes: Routes) -> ExpertRows:
        """
        Copy quantized tokens (tokens, width) to their choices' rows, and probabilities (tokens, top_k) if any.

        Unused rows are zeros.
        """
        top_k = max(routes.dest_row.shape[1], 1)
        is_used = routes.source_choice >= 0
        choice = routes.source_choice.where(is_used, 0).long()
        token = choice // top_k
        data = _select_float8_rows(rows.data, token).view(torch.uint8).where(is_used[:, None], 0).view(E4M3)
        by_row = rows.scale.new_empty(0)
        if probabilities is not None:
            by_row = probabilities.flatten()[choice].where(is_used, 0)
        return ExpertRows(data, rows.scale[token].where(is_used, 1), by_row)

    def sum_rows_and_gather_scalars(
        self, rows: Tensor, scalars: Tensor | None, dest_row: Tensor
    ) -> tuple[Tensor, Tensor]:
        """
        Sum bfloat16 rows (rows, width) by token, (tokens, width), and copy scalars (rows,) by choice, (tokens, top_k).

        dest_row (tokens, top_k) has the choices' rows, or -1, which counts as zeros. Sums are rounded once. Without
        scalars the second result is empty.
        """
        summed = gather_rows_by_choice(rows, dest_row).sum(1).to(rows.dtype)
        if scalars is None:
            return summed, rows.new_empty(0)
        return summed, gather_rows_by_choice(scalars.unsqueeze(1), dest_row).squeeze(2)

    def quantize_experts(self, weight: Tensor) -> ScaledRows:
        """Quantize a weight (experts, outputs, inputs) by expert: data with this shape, and scale (experts,)."""
        wide = weight.float()
        scale = compute_power_of_two_scales(wide.abs().amax((1, 2)))
        return ScaledRows((wide / scale[:, None, None]).to(E4M3), scale)

    def quantize_transposed_experts(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Quantize a weight (experts, outputs, inputs) with scales (experts,): e4m3 (experts, inputs, outputs)."""
        return (weight.float() / scale[:, None, None]).to(E4M3).transpose(1, 2).contiguous()

    def quantize_experts_into(self, weight: Tensor, rows: Float8Rows) -> None:
        """Fill `rows` with a weight's (experts, outputs, inputs) elements, scales by expert and transposed copy."""
        data, scale = self.quantize_experts(weight)
        for target, source in zip(rows, (data, scale, data.transpose(1, 2)), strict=True):
            target.copy_(source)

    def quantize_expert_swiglu(self, gate_and_up: Tensor, probabilities: Tensor) -> ScaledRows:
        """Quantize silu(gate) * up * probability by rows, where `gate_and_up` (rows, 2 * width) is gate and up."""
        gate, up = gate_and_up.float().chunk(2, -1)
        return ScaledRows._make(self.quantize_rows(swiglu_eager(gate, up, probabilities.float()), transposed=False)[:2])

    def quantize_expert_swiglu_gradient(
        self, grad: Tensor, gate_and_up: Tensor, probabilities: Tensor
    ) -> QuantizedSwigluGradient:
        """
        Quantize the gradient of `gate_and_up` (rows, 2 * width) by rows, given the product's gradient (rows, width).
        """
        (gate, up), wide = gate_and_up.float().chunk(2, -1), upcast(grad)
        grad_probabilities = (swiglu_eager(gate, up) * wide).sum(-1).to(probabilities.dtype)
        gradients = compute_swiglu_gradients(wide * probabilities.float().unsqueeze(-1), gate, up)
        data, scale, _ = self.quantize_rows(torch.cat(gradients, 1), transposed=False)
        return QuantizedSwigluGradient(data, scale, grad_probabilities)

    def prepare_outer_product_factors(
        self, left: ScaledRows, right: ScaledRows, choices: Tensor | None, top_k: int, ends: Tensor
    ) -> GroupedFactors:
        """
        Multiply `left` (rows, outputs) by both row scales, and pad every expert's rows to whole groups of columns, for
        `sum_outer_products` with `right` (rows, inputs).

        With choices (rows,), the data in `right` are tokens (tokens, inputs), and row r is token choices[r] // top_k.
        The scales' products multiply `left` relative to the expert's largest, which is returned as the expert's scale.
        """
        count = len(left.data)
        row = torch.arange(count, device=ends.device)
        expert = torch.searchsorted(ends.long(), row, right=True)
        is_used = expert < len(ends)
        expert = expert.clamp_max(len(ends) - 1)
        product = left.scale * right.scale
        largest = product.new_zeros(len(ends)).scatter_reduce(0, expert, product.where(is_used, 0), "amax")
        scale = largest.clamp_min(MIN_SCALE)
        folded = (left.data.float() * (product / scale[expert])[:, None]).to(E4M3)
        # Unused rows have the choice -1, and are dropped below.
        rows = right.data if choices is None else _select_float8_rows(right.data, choices.clamp_min(0).long() // top_k)
        first_column = _compute_begins(_compute_padded_ends(ends))[expert]
        column_count = count_padded_columns(count, len(ends))
        dest_column = (row - _compute_begins(ends)[expert] + first_column).where(is_used, column_count)
        return GroupedFactors(
            _transpose_rows_into_columns(folded, dest_column, column_count),
            _transpose_rows_into_columns(rows, dest_column, column_count),
            scale,
        )

    def multiply_rows_by_expert(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, fast: bool
    ) -> Tensor:
        """
        Return rows a (rows, inner) times their expert's matrix in b (experts, columns, inner), transposed: bfloat16
        (rows, columns), times a_scale (rows,) and b_scale (experts,).
        """
        matrices = b.float().transpose(1, 2) * b_scale[:, None, None]
        return (grouped_gemm_eager.rows(a.float(), matrices, ends) * a_scale[:, None]).bfloat16()

    def sum_outer_products(self, left: Tensor, right: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
        """Return the product of `GroupedFactors`, bfloat16 (experts, outputs, inputs); zeros without rows."""
        product = grouped_gemm_eager.matrices(left.t().float(), right.t().float(), _compute_padded_ends(ends))
        return (product * scale[:, None, None]).bfloat16()


EAGER = Float8Kernels()
