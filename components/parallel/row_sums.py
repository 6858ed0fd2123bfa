"""Sums over whole rows of tokens, of which context and tensor parallel ranks have parts."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom.components.distributed.process_group import SingleProcess
from drawloom.components.parallel.tensor import TensorParallel
from drawloom.components.ports.distributed import Group


class RowSums(TensorParallel):
    """
    A module that computes something of whole rows of tokens.

    `context` ranks have other tokens of the same rows. Several tensor `ranks` split those of this context part, so that
    what belongs to tokens comes as (tokens, ...), padded at the end, and otherwise as (rows, length, ...). Weights of
    tokens, float32 (rows, length), are those of the context part. Without `share_rows` and `split` all tokens are here.
    """

    context: Group = SingleProcess()

    def row_length(self, weights: Tensor) -> int:
        """The length of whole rows, of which this rank has weights (rows, length)."""
        return weights.shape[1] * self.context.size

    def row_weights(self, weights: Tensor) -> Tensor:
        """The sum of the weights (rows, length) over each whole row, float64 (rows,)."""
        return _total(weights.sum(1, dtype=torch.float64), [self.context])

    def row_counts(self, chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
        """
        How many choices of a whole row's tokens fell on each expert, float32 (rows, experts).

        chosen: int64 (tokens, choices) or (rows, length, choices); of the weights (rows, length) the shape is used.
        """
        slots = self.own_tokens(chosen, weights) + experts * self._own_rows(weights).unsqueeze(1)
        found = torch.zeros(len(weights) * experts, device=chosen.device)
        found.scatter_add_(0, slots.flatten(), found.new_ones(()).expand(slots.numel()))
        return _total(found.view(-1, experts), [self.context, self.ranks.group])

    def of_tokens(self, values: Tensor, weights: Tensor) -> Tensor:
        """Values of rows (rows, ...) for each of this rank's tokens: (tokens, ...), 0 for padded, or (rows, 1, ...)."""
        return values.unsqueeze(1) if self.ranks.size == 1 else self._padded(values[self._own_rows(weights)], weights)

    def token_weights(self, weights: Tensor) -> Tensor:
        """The weights (rows, length) of this rank's tokens: (tokens,), 0 for padded, or (rows, length)."""
        if self.ranks.size == 1:
            return weights
        own = self._own(weights)
        return self._padded(weights.flatten()[own.start : own.stop], weights)

    def own_tokens(self, values: Tensor, weights: Tensor) -> Tensor:
        """Values (tokens, n) or (rows, length, n) without what was padded: (tokens, n)."""
        return values.flatten(0, -2)[: len(self._own(weights))]

    def _own(self, weights: Tensor) -> range:
        """The numbers of this rank's tokens among those of its context part."""
        each = -(-weights.numel() // self.ranks.size)
        first = self.ranks.group.rank * each
        return range(min(first, weights.numel()), min(first + each, weights.numel()))

    def _own_rows(self, weights: Tensor) -> Tensor:
        """The row of each of this rank's tokens, int64 (tokens,)."""
        own = self._own(weights)
        return torch.arange(own.start, own.stop, device=weights.device) // max(weights.shape[1], 1)

    def _padded(self, values: Tensor, weights: Tensor) -> Tensor:
        missing = -(-weights.numel() // self.ranks.size) - len(values)
        return F.pad(values, (0, 0) * (values.ndim - 1) + (0, missing))


def share_rows(module: nn.Module, context: Group) -> None:
    """Tell the modules of a model which ranks have other tokens of the same rows."""
    for part in module.modules():
        if isinstance(part, RowSums):
            part.context = context


def _total(local: Tensor, groups: Sequence[Group]) -> Tensor:
    """The sum of a tensor of any shape over the ranks of groups, in place."""
    if not local.is_meta:
        for group in groups:
            group.sum(local)
    return local
