"""
Context parallelism: every row's tokens are partitioned over ranks, which exchange keys and values.

A rank has one piece from a row's beginning and one from its end, so causal attention costs the same on all ranks (Dubey
et al. 2024, "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.2). Every rank gathers all keys and values,
which are small with grouped queries.
"""

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
    """
    This rank's tokens in a row: `token_indices` are their indices in the row, int64 (tokens,); `order` sorts all ranks'
    tokens.
    """

    token_indices: Tensor
    order: Tensor
    group: Group

    @classmethod
    def for_rank(cls, length: int, group: Group) -> "ContextPart":
        """
        Return this rank's part of rows with `length` tokens. Raises UserError if the rows can't be divided evenly.
        """
        positions = [_compute_token_positions(length, group.size, rank) for rank in range(group.size)]
        return cls(positions[group.rank], torch.cat(positions).argsort(), group)

    def select_own_tokens(self, batch: AnyBatch) -> AnyBatch:
        """Return the batch with only this rank's tokens."""
        return batch.take_tokens(self.token_indices)

    def gather(self, part: Tensor) -> Tensor:
        gathered: Tensor = _Gather.apply(part, self.group)  # type: ignore[no-untyped-call]
        return gathered if part.is_meta else gathered.index_select(1, self.order)

    @property
    def piece_indices(self) -> tuple[int, ...]:
        return _compute_piece_indices(self.group.size, self.group.rank, len(self.token_indices))

    def gather_pieces(self, own: Tensor) -> Tensor:
        gathered: Tensor = _Gather.apply(own, self.group)  # type: ignore[no-untyped-call]
        size, tokens = self.group.size, len(self.token_indices)
        pieces = [piece for rank in range(size) for piece in _compute_piece_indices(size, rank, tokens)]
        # Without an index on the device, whose copy would wait.
        return torch.stack([gathered[:, pieces.index(piece)] for piece in range(len(pieces))], 1)


class _Gather(torch.autograd.Function):
    """All-gather along dimension 1, with a reduce-scatter in the backward pass."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        """Gather parts (rows, tokens, ...) in rank order: (rows, size * tokens, ...) in the same dtype."""
        ctx.group = group
        if part.is_meta:
            shape = part.shape[0], group.size * part.shape[1], *part.shape[2:]
            return emulate_collective(part, shape, "all_gather", "context", group.size)
        return group.gather(part).movedim(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if grad.is_meta:
            shape = grad.shape[0], grad.shape[1] // ctx.group.size, *grad.shape[2:]
            return emulate_collective(grad, shape, "reduce_scatter", "context", ctx.group.size), None
        return ctx.group.reduce_scatter(torch.stack(grad.chunk(ctx.group.size, 1))), None


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
