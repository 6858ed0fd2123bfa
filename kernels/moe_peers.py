"""
Expert parallelism by reading other ranks' memory: tokens are copied to local experts, and outputs summed.

All ranks in a group have equally many token slots, and the group's tokens are numbered by rank, then by slot. Plain
torch reads other ranks' tensors, Triton reads their addresses. No function is differentiable: copying tokens and
summing by token are backward passes for one another.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from drawloom.kernels.moe import DROPPED, Routes, gather_rows_by_choice
from drawloom.kernels.operation import accumulation_dtype

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


EAGER = EagerPeerExchange()
