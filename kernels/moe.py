"""Mixture of experts: routing tables, copying tokens to their experts' rows, and summing the rows by token."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.operation import as_new_alias, once_differentiable, upcast
from drawloom.kernels.results import PermutedRows

DROPPED = -1
"""Expert index of a dropped choice, which is not computed, and row of such a choice."""


class Routes(NamedTuple):
    """
    Routing tables, int32. A choice is one of a token's `top_k` experts; every choice has a row unless it is dropped.

    `dest_row` (tokens, top_k): the choice's row, or -1. `source_choice` (tokens * top_k,): the row's choice, as token *
    top_k + the index among the token's choices, or -1. `offsets` (experts,): the end of the expert's rows; expert 0
    begins at row 0. If the host knows how many rows there are, `source_choice` may be cut to that length: its length is
    the row count.
    """

    dest_row: Tensor
    source_choice: Tensor
    offsets: Tensor


def moe_routes_eager(expert_indices: Tensor, num_experts: int) -> Routes:
    """Return routes for expert_indices (tokens, top_k), from 0 to num_experts - 1, or -1 for dropped choices."""
    flat = expert_indices.flatten().to(torch.int64)
    chosen = flat.where(flat >= 0, num_experts)
    order = chosen.argsort(stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device).scatter_add_(
        0, chosen, chosen.new_ones(()).expand_as(chosen)
    )
    offsets = counts[:num_experts].cumsum(0)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(flat), device=flat.device))
    used = torch.arange(len(flat), device=flat.device) < (offsets[-1] if num_experts else 0)
    return Routes(
        rows.where(flat >= 0, DROPPED).view(expert_indices.shape).to(torch.int32),
        order.where(used, DROPPED).to(torch.int32),
        offsets.to(torch.int32),
    )


def moe_permute_eager(x: Tensor, probabilities: Tensor, routes: Routes) -> PermutedRows:
    """
    Copy tokens to their choices' rows: x (tokens, hidden_size), probabilities (tokens, top_k).

    Returns the rows (len(routes.source_choice), hidden_size) in x's dtype, and the rows' probabilities. Unused rows
    come last and are zero.
    """
    return PermutedRows._make(_Permute.apply(x, probabilities, *routes))  # type: ignore[no-untyped-call]


def moe_unpermute_eager(rows: Tensor, routes: Routes, probabilities: Tensor | None = None) -> Tensor:
    """
    Sum the rows of a token's choices, times their probabilities if any, in at least float32.

    rows (tokens * top_k, hidden_size), probabilities (tokens, top_k); returns (tokens, hidden_size) in the rows' dtype,
    zero for a token without a kept choice.
    """
    summed: Tensor = _Unpermute.apply(rows, probabilities, *routes)  # type: ignore[no-untyped-call]
    return summed


class _Permute(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probabilities: Tensor, dest_row: Tensor, source_choice: Tensor, offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return rows (rows, hidden_size) from x (tokens, hidden_size), and their probabilities (rows,)."""
        ctx.save_for_backward(dest_row)
        per_token = max(dest_row.shape[1], 1)
        is_used = source_choice >= 0
        token = (source_choice // per_token).where(is_used, 0).to(torch.int64)
        flat = probabilities.flatten()[source_choice.where(is_used, 0).to(torch.int64)]
        return x[token].where(is_used.unsqueeze(-1), 0), flat.where(is_used, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_probabilities: Tensor) -> tuple[Tensor | None, ...]:
        (dest_row,) = ctx.saved_tensors
        grad_x = gather_rows_by_choice(grad, dest_row).sum(1).to(grad.dtype)
        by_choice = gather_rows_by_choice(grad_probabilities.unsqueeze(1), dest_row).squeeze(2)
        return grad_x, by_choice.to(grad_probabilities.dtype), None, None, None


class _Unpermute(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, probabilities: Tensor | None, dest_row: Tensor, source_choice: Tensor, offsets: Tensor
    ) -> Tensor:
        """Return (tokens, hidden_size) in the dtype of rows (rows, hidden_size); probabilities are (tokens, top_k)."""
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, probabilities, dest_row, source_choice)
        gathered = gather_rows_by_choice(rows, dest_row)
        weighted = gathered if probabilities is None else gathered * probabilities.unsqueeze(-1)
        return as_new_alias(weighted.sum(1).to(rows.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, probabilities, dest_row, source_choice = ctx.saved_tensors
        is_used, choice = source_choice >= 0, source_choice.where(source_choice >= 0, 0).to(torch.int64)
        grad_rows = grad[choice // max(dest_row.shape[1], 1)].where(is_used.unsqueeze(-1), 0)
        if probabilities is not None:
            grad_rows = (upcast(grad_rows) * probabilities.flatten()[choice].unsqueeze(-1)).to(grad.dtype)
        grad_probabilities = None
        if rows is not None:
            grad_probabilities = (
                (gather_rows_by_choice(rows, dest_row) * grad.unsqueeze(1)).sum(-1).to(probabilities.dtype)
            )
        return grad_rows, grad_probabilities, None, None, None


def gather_rows_by_choice(rows: Tensor, dest_row: Tensor) -> Tensor:
    """
    Return a row per choice, (tokens, top_k, hidden_size) in at least float32, and zeros for dropped choices.

    rows (rows, hidden_size), dest_row int32 (tokens, top_k).
    """
    has_row = dest_row >= 0
    if not len(rows):
        return upcast(rows.new_zeros(*dest_row.shape, *rows.shape[1:]))
    return upcast(rows[dest_row.where(has_row, 0).to(torch.int64)]).where(has_row.unsqueeze(-1), 0)
