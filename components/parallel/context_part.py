"""
Context parallelism: every row's tokens are partitioned over ranks, which exchange keys and values.

A rank has one piece from a row's beginning and one from its end, so causal attention costs the same on all ranks (Dubey
et al. 2024, "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.2). Every rank gathers all keys and values,
which are small with grouped queries.
"""

from collections.abc import Callable, Sequence
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
    """This rank's tokens in a row, a `RowPart`: `token_indices` are their indices in the row, int64 (tokens,)."""

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
            pieces = gathered.unflatten(2, (len(self.piece_indices), -1))  # type: ignore[no-untyped-call]
            return torch.cat([pieces[rank, :, number] for rank, number in self.list_piece_owners(others_only=True)], 1)

        return wait

    def start_summing_for_owners(self, others: Tensor) -> Callable[[], Tensor]:
        owners = self.list_piece_owners(others_only=True)
        pieces = others.unflatten(1, (len(owners), -1))  # type: ignore[no-untyped-call]
        # Summed over ranks; this rank adds zeros to its own pieces: (rows, own pieces, a piece's tokens, ...).
        own, pending = self.group.start_reduce_scatter(self.arrange_by_rank(pieces, owners))

        def wait() -> Tensor:
            pending.wait()
            return own.flatten(1, 2)

        return wait

    def arrange_by_rank(self, pieces: Tensor, owners: Sequence[tuple[int, int]]) -> Tensor:
        """Return pieces (rows, pieces, ...) by owner: (size, rows, a rank's pieces, ...), zeros for missing pieces."""
        arranged = pieces.new_zeros(self.group.size, len(pieces), len(self.piece_indices), *pieces.shape[2:])
        for piece, (rank, number) in enumerate(owners):
            arranged[rank, :, number] = pieces[:, piece]
        return arranged

    def list_piece_owners(self, others_only: bool = False) -> list[tuple[int, int]]:
        """Return (rank, number among the rank's pieces) for a row's pieces in order, or only for other ranks'."""
        size, tokens = self.group.size, len(self.token_indices)
        indices = {rank: _compute_piece_indices(size, rank, tokens) for rank in range(size)}
        if others_only:
            del indices[self.group.rank]
        owners = {piece: (rank, number) for rank, own in indices.items() for number, piece in enumerate(own)}
        return [owners[piece] for piece in sorted(owners)]


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
        return torch.stack([gathered[rank, :, number] for rank, number in part.list_piece_owners()], 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        part, size = ctx.part, ctx.part.group.size
        if grad.is_meta:
            shape = grad.shape[0], grad.shape[1] // size, *grad.shape[2:]
            return emulate_collective(grad, shape, "reduce_scatter", "context", size), None
        return part.group.reduce_scatter(part.arrange_by_rank(grad, part.list_piece_owners())), None


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
    indices = _compute_piece_indices(size, rank, length // size)
    return torch.arange(length).view(size * len(indices), -1)[list(indices)].flatten()
