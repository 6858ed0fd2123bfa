"""
Casts and products in float8 for experts: rows sorted by expert, times their expert's matrix.

`experts.py` explains the recipe. Rows past the last end may hold any values, in inputs and results; they
contribute to no weight's gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from drawloom.kernels.float8.casts import (
    E4M3,
    Float8Kernels,
    Float8Rows,
    ScaledRows,
    compute_power_of_two_scales,
)
from drawloom.kernels.grouped_gemm import grouped_gemm_eager
from drawloom.kernels.moe import Routes, gather_rows_by_choice
from drawloom.kernels.operation import upcast
from drawloom.kernels.swiglu import compute_swiglu_gradients, swiglu_eager

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


class GroupedFloat8Kernels(Float8Kernels):
    """
    Casts and products in float8 for experts, here in plain torch, with operands widened to float32.

    `ends` are the rows' ends by expert, int32 (experts,).
    """

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
        Sum bfloat16 rows (rows, width) by token: (tokens, width); and copy scalars (rows,) to choices (tokens, top_k).
        """
        summed = gather_rows_by_choice(rows, dest_row).sum(1).to(rows.dtype)
        by_choice = (
            rows.new_empty(0) if scalars is None else gather_rows_by_choice(scalars.unsqueeze(1), dest_row).squeeze(2)
        )
        return summed, by_choice

    def quantize_experts(self, weight: Tensor) -> ScaledRows:
        """Quantize a weight (experts, outputs, inputs) by expert: data with this shape, and scale (experts,)."""
        wide = weight.float()
        scale = compute_power_of_two_scales(wide.abs().amax((1, 2)))
        return ScaledRows((wide / scale[:, None, None]).to(E4M3), scale)

    def quantize_transposed_experts(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Quantize a weight (experts, outputs, inputs) with scales (experts,): e4m3 (experts, inputs, outputs)."""
        return (weight.float() / scale[:, None, None]).to(E4M3).transpose(1, 2).contiguous()

    def quantize_experts_into(self, weight: Tensor, rows: Float8Rows) -> None:
        """Fill `rows` with a weight's elements, scales by expert and transposed copy."""
        data, scale = self.quantize_experts(weight)
        for target, source in zip(rows, (data, scale, data.transpose(1, 2)), strict=True):
            target.copy_(source)

    def quantize_expert_swiglu(self, gate_and_up: Tensor, probabilities: Tensor) -> ScaledRows:
        """Quantize silu(gate) * up * probability by rows, where `gate_and_up` (rows, 2 * width) is gate and up."""
        gate, up = gate_and_up.float().chunk(2, -1)
        return ScaledRows._make(self.quantize_rows(swiglu_eager(gate, up, probabilities.float()), False)[:2])

    def quantize_expert_swiglu_gradient(
        self, grad: Tensor, gate_and_up: Tensor, probabilities: Tensor
    ) -> QuantizedSwigluGradient:
        """
        Quantize the gradient of `gate_and_up` (rows, 2 * width) by rows, given the product's gradient (rows, width).
        """
        (gate, up), wide = gate_and_up.float().chunk(2, -1), upcast(grad)
        grad_probabilities = (swiglu_eager(gate, up) * wide).sum(-1).to(probabilities.dtype)
        gradients = compute_swiglu_gradients(wide * probabilities.float().unsqueeze(-1), gate, up)
        data, scale, _ = self.quantize_rows(torch.cat(gradients, 1), False)
        return QuantizedSwigluGradient(data, scale, grad_probabilities)

    def prepare_outer_product_factors(
        self, left: ScaledRows, right: ScaledRows, choices: Tensor | None, top_k: int, ends: Tensor
    ) -> GroupedFactors:
        """
        Return factors for sums of outer products over every expert's rows, left (rows, outputs) and right (rows,
        inputs).

        With choices (rows,), the data in `right` are tokens (tokens, inputs), and row r is token choices[r] // top_k.
        Both scales are by row. Their products multiply `left`, relative to the expert's largest.
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
        rows = right.data if choices is None else _select_float8_rows(right.data, choices.clamp_min(0).long() // top_k)
        begins = ends.roll(1).index_fill(0, ends.new_zeros(1).long(), 0)
        padded = _compute_padded_ends(ends)
        column = row - begins[expert] + padded.roll(1).index_fill(0, ends.new_zeros(1).long(), 0)[expert]
        columns = count_padded_columns(count, len(ends))
        column = column.where(is_used, columns)
        return GroupedFactors(
            _transpose_rows_into_columns(folded, column, columns),
            _transpose_rows_into_columns(rows, column, columns),
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


def _compute_padded_ends(ends: Tensor) -> Tensor:
    """Return the columns' ends by expert."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    return ((counts + GROUP - 1) // GROUP * GROUP).cumsum(0).to(ends.dtype)


def _select_float8_rows(data: Tensor, rows: Tensor) -> Tensor:
    """Return e4m3 rows (n, width); torch does not index float8 on a CPU."""
    return data.view(torch.uint8)[rows].view(E4M3)


def _transpose_rows_into_columns(rows: Tensor, column: Tensor, columns: int) -> Tensor:
    """Return e4m3 (rows, width) as (width, columns), with row i at column[i]; column `columns` is dropped."""
    result = rows.new_zeros(columns + 1, rows.shape[1]).view(torch.uint8)
    return result.index_copy(0, column, rows.view(torch.uint8))[:columns].t().contiguous().view(E4M3)


EAGER = GroupedFloat8Kernels()
