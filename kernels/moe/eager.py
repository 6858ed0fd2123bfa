"""
Mixture of experts: routing tables, copying tokens to their experts' rows, and summing the rows by token.

Expert parallelism by reading other ranks' memory: tokens are copied to local experts, and outputs summed.

All ranks in a group have equally many token slots, and the group's tokens are numbered by rank, then by slot. Plain
torch reads other ranks' tensors, Triton reads their addresses. No function is differentiable: copying tokens and
summing by token are backward passes for one another.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.operation import accumulation_dtype, as_new_alias, once_differentiable, upcast
from drawloom.kernels.results import PermutedRows, Routes

DROPPED = -1
"""Expert index of a dropped choice, which is not computed, and row of such a choice."""


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


PeerTensors = tuple[Sequence[Tensor], Tensor]
"""Tensors (slots, ...) of the ranks of a group, in their order, and their addresses, int64 (ranks,)."""


class EagerPeerExchange:
    """Operations for an exchange between ranks, in plain torch."""

    @staticmethod
    def write_tokens_to_slots(values: Sequence[Tensor], own_slots: Sequence[Tensor]) -> None:
        """
        Write tensors (tokens, columns) with any dtypes to this rank's slots (slots, columns).

        The second and third tensors have few columns. The third has the choices; unused slots get -1.
        """
        for source, target in zip(values, own_slots, strict=True):
            target[: len(source)].copy_(source)
        for choices in own_slots[2:]:
            choices[len(values[0]) :].fill_(DROPPED)

    @staticmethod
    def localize_choices(chosen: PeerTensors, first: int, experts: int) -> Tensor:
        """
        Return the local experts that the group's tokens chose, int32 (ranks * slots, top_k); -1 for other choices.

        This rank has `experts` experts from `first` on. chosen: int32 (slots, top_k) by rank, -1 in unused slots.
        """
        local = torch.cat(list(chosen[0])) - first
        return local.where((local >= 0) & (local < experts), DROPPED)

    @staticmethod
    def limit_routes_and_flag_overflow(routes: Routes, row_limit: int, peak_rows: Tensor) -> tuple[Routes, Tensor]:
        """
        Drop choices beyond `row_limit` rows; return the routes and a flag, float32 (1,), NaN if any are dropped.

        `peak_rows`, int32 (1,), is raised to the number of rows before the limit.
        """
        dest_row, source_choice, offsets = routes
        rows = offsets[-1:]
        torch.maximum(peak_rows, rows, out=peak_rows)
        flag = torch.zeros(1, device=rows.device).masked_fill(rows > row_limit, math.nan)
        limited = dest_row.where(dest_row < row_limit, DROPPED), source_choice[:row_limit], offsets.clamp(max=row_limit)
        return Routes(*limited), flag

    @staticmethod
    def read_rows_and_scalars(
        tokens: PeerTensors, scalars: PeerTensors | None, routes: Routes
    ) -> tuple[Tensor, Tensor | None]:
        """
        Copy tokens, (slots, hidden_size) by rank, to their choices' rows; return (rows, hidden_size).

        There are len(source_choice) rows; unused rows have any values. Also returns the rows' scalars (rows,), from
        scalars (slots, top_k) by rank.
        """
        dest_row, source_choice, _ = routes
        choice = source_choice.where(source_choice >= 0, 0).to(torch.int64)
        top_k = max(dest_row.shape[1], 1)
        row_scalars = None if scalars is None else torch.cat(list(scalars[0])).flatten()[choice]
        return torch.cat(list(tokens[0]))[choice // top_k], row_scalars

    @staticmethod
    def publish_token_sums(
        rows: Tensor, scalars: Tensor | None, dest_row: Tensor, sums: Tensor, by_choice: Tensor | None
    ) -> None:
        """
        Sum rows (rows, hidden_size) by token into sums (tokens, hidden_size).

        Also writes scalars (rows,) by choice to by_choice (tokens, top_k). dest_row is int32 (tokens, top_k).
        """
        sums.copy_(gather_rows_by_choice(rows, dest_row).sum(1))
        if scalars is not None and by_choice is not None:
            by_choice.copy_(gather_rows_by_choice(scalars.unsqueeze(1), dest_row).squeeze(2))

    @staticmethod
    def read_token_sums_and_scalars(
        staged: PeerTensors, by_choice: PeerTensors | None, chosen: Tensor, first: int, experts: int
    ) -> tuple[Tensor, Tensor | None]:
        """
        Sum by token over the ranks with a chosen expert, in rank order, in at least float32.

        staged: (ranks * slots, hidden_size) by rank, where this rank's tokens begin at `first`; by_choice: (ranks *
        slots, top_k) by rank; chosen: experts (tokens, top_k), -1 for dropped choices; every rank has `experts`.
        Returns (tokens, hidden_size) and the choices' scalars, (tokens, top_k).
        """
        rank = chosen.div(experts, rounding_mode="floor").where(chosen >= 0, DROPPED)
        local = slice(first, first + len(chosen))
        parts, scalars = staged[0], None if by_choice is None else by_choice[0]
        total = torch.zeros_like(parts[0][local], dtype=accumulation_dtype(parts[0]))
        choice_scalars = torch.zeros_like((scalars or parts)[0][local])
        for number, part in enumerate(parts):
            is_on_rank = rank == number
            total += part[local].where(is_on_rank.any(1, keepdim=True), 0)
            if scalars is not None:
                choice_scalars = scalars[number][local].where(is_on_rank, choice_scalars)
        return total.to(parts[0].dtype), None if scalars is None else choice_scalars


moe_peers_eager = EagerPeerExchange()
