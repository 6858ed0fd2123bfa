"""
Tokens of several ranks whose memory this rank reads: copies for the experts that are here, and sums of what they give.

Each rank of a group offers as many slots for tokens as the others, and the group's tokens are numbered by rank, then
by slot. Plain torch reads the tensors of other ranks, Triton their addresses. Nothing here is differentiable: copies
of tokens and sums by token are the backward passes of each other.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from drawloom.kernels.moe import DROPPED, Routes, gathered_rows
from drawloom.kernels.operation import accumulation_dtype

Peers = tuple[Sequence[Tensor], Tensor]
"""A tensor of each rank of a group, by rank, all (slots, ...), and int64 (ranks,), the address of each."""


class EagerPeerExchange:
    """The parts of an exchange, in plain torch."""

    @staticmethod
    def publish(given: Sequence[Tensor], shown: Sequence[Tensor]) -> None:
        """
        Write tokens (tokens, columns) of any dtypes to the slots of this rank, (slots, columns) each, the second and
        third of few columns; -1 for the choices, the third, of unused slots.
        """
        for source, target in zip(given, shown, strict=True):
            target[: len(source)].copy_(source)
        for choices in shown[2:]:
            choices[len(given[0]) :].fill_(DROPPED)

    @staticmethod
    def choices(chosen: Peers, first: int, experts: int) -> Tensor:
        """
        Which experts of this rank, `first` and the next, the tokens of the group chose: int32 (ranks * slots, top_k),
        from 0, and -1 for experts of other ranks. chosen: int32 (slots, top_k) of each rank, -1 in unused slots.
        """
        local = torch.cat(list(chosen[0])) - first
        return local.where((local >= 0) & (local < experts), DROPPED)

    @staticmethod
    def limit(routes: Routes, room: int, most: Tensor) -> tuple[Routes, Tensor]:
        """
        Routes to `room` rows at most, further choices dropped, and float32 (1,): NaN if there are such, else 0.

        most, int32 (1,), becomes the number of rows before the limit, if that is greater.
        """
        dest_row, source_choice, offsets = routes
        rows = offsets[-1:]
        torch.maximum(most, rows, out=most)
        flag = torch.zeros(1, device=rows.device).masked_fill(rows > room, math.nan)
        limited = dest_row.where(dest_row < room, DROPPED), source_choice[:room], offsets.clamp(max=room)
        return Routes(*limited), flag

    @staticmethod
    def rows(tokens: Peers, scalars: Peers | None, routes: Routes) -> tuple[Tensor, Tensor | None]:
        """
        The tokens, (slots, hidden_size) of each rank, at the rows of their choices, (rows, hidden_size); as many rows
        as `source_choice` has places, and unused ones hold anything. Of scalars, (slots, top_k), one by row.
        """
        dest_row, source_choice, _ = routes
        place = source_choice.where(source_choice >= 0, 0).to(torch.int64)
        top_k = max(dest_row.shape[1], 1)
        of_rows = None if scalars is None else torch.cat(list(scalars[0])).flatten()[place]
        return torch.cat(list(tokens[0]))[place // top_k], of_rows

    @staticmethod
    def stage(rows: Tensor, scalars: Tensor | None, dest_row: Tensor, sums: Tensor, by_choice: Tensor | None) -> None:
        """
        Write the sum of each token's rows, (rows, hidden_size), to sums, (tokens, hidden_size), and the scalar of each
        choice's row, scalars (rows,), to by_choice (tokens, top_k); dest_row is int32 (tokens, top_k).
        """
        sums.copy_(gathered_rows(rows, dest_row).sum(1))
        if scalars is not None and by_choice is not None:
            by_choice.copy_(gathered_rows(scalars.unsqueeze(1), dest_row).squeeze(2))

    @staticmethod
    def sums(
        staged: Peers, by_choice: Peers | None, chosen: Tensor, first: int, experts: int
    ) -> tuple[Tensor, Tensor | None]:
        """
        The sums by token over the ranks that have an expert of its choice, in the order of ranks, in at least float32.

        staged: (ranks * slots, hidden_size) of each rank, where this rank's tokens begin at `first`; by_choice: (ranks
        * slots, top_k); chosen: integers (tokens, top_k), -1 for dropped choices, of which each rank has `experts`.
        Gives (tokens, hidden_size), and the scalar of each choice, (tokens, top_k).
        """
        rank = chosen.div(experts, rounding_mode="floor").where(chosen >= 0, DROPPED)
        own = slice(first, first + len(chosen))
        parts, scalars = staged[0], None if by_choice is None else by_choice[0]
        total = torch.zeros_like(parts[0][own], dtype=accumulation_dtype(parts[0]))
        found = torch.zeros_like((scalars or parts)[0][own])
        for number, part in enumerate(parts):
            here = rank == number
            total += part[own].where(here.any(1, keepdim=True), 0)
            if scalars is not None:
                found = scalars[number][own].where(here, found)
        return total.to(parts[0].dtype), None if scalars is None else found


EAGER = EagerPeerExchange()
