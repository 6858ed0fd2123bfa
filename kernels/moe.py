"""Mixture of experts: routing tables, permuting tokens to their experts' rows, and summing the rows by token."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.operation import accumulation_dtype, as_new_tensor, once_differentiable

DROPPED = -1
"""The expert index of a dropped choice, which is not computed, and the row of such a choice."""


class Routes(NamedTuple):
    """
    Routing tables, int32. A choice is one of a token's `top_k` experts; each choice that is not dropped has a row.

    `dest_row` (tokens, top_k): the row of each choice, or -1. `source_choice` (tokens * top_k,): the choice of each
    row, as token * top_k + its place in the token's choices, or -1. `offsets` (experts,): where each expert's rows
    end; those of the first begin at 0. Where the number of rows is known to the host, the rest of `source_choice` may
    be cut off: as many rows are made as it has places.
    """

    dest_row: Tensor
    source_choice: Tensor
    offsets: Tensor


def moe_routes_eager(expert_indices: Tensor, num_experts: int) -> Routes:
    """Routes for expert_indices (tokens, top_k), integers from 0 to num_experts - 1, or -1 for dropped choices."""
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


def moe_permute_eager(x: Tensor, probabilities: Tensor, routes: Routes) -> tuple[Tensor, Tensor]:
    """
    Copy tokens to the rows of their choices: x (tokens, hidden_size), probabilities (tokens, top_k).

    Returns the rows (tokens * top_k, hidden_size) in the dtype of x and the probability of each row (tokens * top_k,),
    or as many as `routes.source_choice` has places. Unused rows come last and are zero.
    """
    both: tuple[Tensor, Tensor] = _Permute.apply(x, probabilities, *routes)  # type: ignore[no-untyped-call]
    return both


def moe_unpermute_eager(rows: Tensor, routes: Routes, probabilities: Tensor | None = None) -> Tensor:
    """
    Sum the rows of each token's choices, times their probabilities if given; summed in at least float32.

    rows (tokens * top_k, hidden_size), probabilities (tokens, top_k); returns (tokens, hidden_size) in the dtype of
    rows, zero for a token whose choices are all dropped.
    """
    summed: Tensor = _Unpermute.apply(rows, probabilities, *routes)  # type: ignore[no-untyped-call]
    return summed


class _Permute(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probabilities: Tensor, dest_row: Tensor, source_choice: Tensor, offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x (tokens, hidden_size) and probabilities (tokens, top_k), by row: (rows, hidden_size) and (rows,)."""
        ctx.save_for_backward(dest_row)
        per_token = max(dest_row.shape[1], 1)
        needed = source_choice >= 0
        token = (source_choice // per_token).where(needed, 0).to(torch.int64)
        flat = probabilities.flatten()[source_choice.where(needed, 0).to(torch.int64)]
        return x[token].where(needed.unsqueeze(-1), 0), flat.where(needed, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_probabilities: Tensor) -> tuple[Tensor | None, ...]:
        (dest_row,) = ctx.saved_tensors
        summed = gathered_rows(grad, dest_row).sum(1).to(grad.dtype)
        of_probabilities = (
            gathered_rows(grad_probabilities.unsqueeze(1), dest_row).squeeze(2).to(grad_probabilities.dtype)
        )
        return summed, of_probabilities.to(grad_probabilities.dtype), None, None, None


class _Unpermute(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, probabilities: Tensor | None, dest_row: Tensor, source_choice: Tensor, offsets: Tensor
    ) -> Tensor:
        """rows (rows, hidden_size), probabilities (tokens, top_k); gives (tokens, hidden_size) in the dtype of rows."""
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, probabilities, dest_row, source_choice)
        gathered = gathered_rows(rows, dest_row)
        weighted = gathered if probabilities is None else gathered * probabilities.unsqueeze(-1)
        return as_new_tensor(weighted.sum(1).to(rows.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, probabilities, dest_row, source_choice = ctx.saved_tensors
        needed, place = source_choice >= 0, source_choice.where(source_choice >= 0, 0).to(torch.int64)
        of_rows = grad[place // max(dest_row.shape[1], 1)].where(needed.unsqueeze(-1), 0)
        if probabilities is not None:
            of_rows = (_upcast(of_rows) * probabilities.flatten()[place].unsqueeze(-1)).to(grad.dtype)
        of_probabilities = None
        if rows is not None:
            of_probabilities = (gathered_rows(rows, dest_row) * grad.unsqueeze(1)).sum(-1).to(probabilities.dtype)
        return of_rows, of_probabilities, None, None, None


def gathered_rows(rows: Tensor, dest_row: Tensor) -> Tensor:
    """
    The row of each choice, (tokens, top_k, hidden_size) in at least float32, of rows (rows, hidden_size) and dest_row,
    int32 (tokens, top_k); zero for dropped choices.
    """
    known = dest_row >= 0
    if not len(rows):
        return _upcast(rows.new_zeros(*dest_row.shape, *rows.shape[1:]))
    return _upcast(rows[dest_row.where(known, 0).to(torch.int64)]).where(known.unsqueeze(-1), 0)


def _upcast(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x))
