"""
Context parallelism: every row's tokens are partitioned over ranks, which exchange keys and values.

A rank has one piece from a row's beginning and one from its end, so causal attention costs the same on all ranks (Dubey
et al. 2024, "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.2). Every rank gathers all keys and values,
which are small with grouped queries.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from drawloom import UserError
from drawloom.components.parallel.meta_collectives import emulate_collective
from drawloom.ports import Batch, Group

AnyBatch = TypeVar("AnyBatch", bound=Batch)


@attrs.frozen(eq=False)
class ContextPart:
    """This rank's tokens in a row: `token_indices` are their indices in the row, int64 (tokens,)."""

    token_indices: Tensor
    group: Group

    @classmethod
    def for_rank(cls, length: int, group: Group) -> "ContextPart":
        """
        Return this rank's part of rows with `length` tokens. Raises UserError if the rows can't be divided evenly.
        """
        return cls(_compute_token_positions(length, group.size, group.rank), group)

    def select_own_tokens(self, batch: AnyBatch) -> AnyBatch:
        """Return the batch with only this rank's tokens."""
        return batch.take_tokens(self.token_indices)

    @property
    def piece_indices(self) -> tuple[int, ...]:
        return _compute_piece_indices(self.group.size, self.group.rank, len(self.token_indices))

    def gather(self, part: Tensor) -> Tensor:
        return self.gather_pieces(part.unflatten(1, (len(self.piece_indices), -1))).flatten(1, 2)  # type: ignore[no-untyped-call]

    def gather_pieces(self, own: Tensor) -> Tensor:
        gathered: Tensor = _Gather.apply(own, self)  # type: ignore[no-untyped-call]
        return gathered

    def start_gathering_others(self, own: Tensor) -> Callable[[], Tensor]:
        gathered, pending = self.group.start_gather(own)

        def wait() -> Tensor:
            pending.wait()
            places = self.list_places(others=True)
            pieces = gathered.unflatten(2, (len(self.piece_indices), -1))  # type: ignore[no-untyped-call]
            return torch.cat([pieces[rank, :, number] for rank, number in places], 1)

        return wait

    def start_summing_for_owners(self, others: Tensor) -> Callable[[], Tensor]:
        places = self.list_places(others=True)
        numbers, length = len(self.piece_indices), others.shape[1] // len(places)
        parts = others.new_empty(self.group.size, len(others), numbers, length, *others.shape[2:])
        parts[self.group.rank] = 0
        for (rank, number), piece in zip(places, torch.split(others, length, 1), strict=True):
            parts[rank, :, number] = piece
        own, pending = self.group.start_reduce_scatter(parts)

        def wait() -> Tensor:
            pending.wait()
            return own.flatten(1, 2)

        return wait

    def list_places(self, others: bool = False) -> list[tuple[int, int]]:
        """Return a row's pieces in order, or only other ranks', each as its rank and its number among that rank's."""
        size, tokens = self.group.size, len(self.token_indices)
        indices = {rank: _compute_piece_indices(size, rank, tokens) for rank in range(size)}
        if others:
            del indices[self.group.rank]
        places = {piece: (rank, number) for rank, own in indices.items() for number, piece in enumerate(own)}
        return [places[piece] for piece in sorted(places)]


class _Gather(torch.autograd.Function):
    """All-gather of pieces, in their order along rows, with a reduce-scatter in the backward pass."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, part: ContextPart) -> Tensor:
        """Gather pieces (rows, own pieces, ...): (rows, all pieces, ...) in the same dtype."""
        ctx.part, size = part, part.group.size
        if own.is_meta:
            shape = own.shape[0], size * own.shape[1], *own.shape[2:]
            return emulate_collective(own, shape, "all_gather", "context", size)
        gathered = part.group.gather(own)
        # Without an index on the device, whose copy would wait.
        return torch.stack([gathered[rank, :, number] for rank, number in part.list_places()], 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        part, size = ctx.part, ctx.part.group.size
        if grad.is_meta:
            shape = grad.shape[0], grad.shape[1] // size, *grad.shape[2:]
            return emulate_collective(grad, shape, "reduce_scatter", "context", size), None
        parts = grad.new_empty(size, len(grad), grad.shape[1] // size, *grad.shape[2:])
        for piece, (rank, number) in enumerate(part.list_places()):
            parts[rank, :, number] = grad[:, piece]
        return part.group.reduce_scatter(parts), None


def _compute_piece_indices(size: int, rank: int, tokens: int) -> tuple[int, ...]:
    """
    Return the indices of a rank's pieces, among all ranks' equal pieces along a row.

    With an even token count a rank has two pieces, one from the row's start and one from its end; else one.
    """
    return (rank,) if tokens % 2 else (rank, 2 * size - 1 - rank)


def _compute_token_positions(length: int, size: int, rank: int) -> Tensor:
    """
    Return a rank's token positions in a row: int64 (tokens,).

    Two pieces, one from the row's start and one from its end, balance causal attention over ranks. Raises UserError if
    the rows can't be divided evenly.
    """
    if length % size:
        raise UserError(
            f"rows of {length} tokens can't be partitioned over mesh.context = {size} ranks; "
            f"write a length that is a multiple of {size}, or better of {2 * size}, which balances the ranks' work",
            exit_code=2,
        )
    pieces = torch.arange(length).chunk(2 * size if length % (2 * size) == 0 else size)
    return torch.cat([pieces[rank], pieces[-1 - rank]]) if len(pieces) == 2 * size else pieces[rank]
