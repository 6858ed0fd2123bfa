"""Sums over whole rows of tokens, of which context and tensor parallel ranks have parts."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from drawloom.components.distributed.process_group import SingleProcess
from drawloom.components.distributed.tensor_parallel import TensorParallel
from drawloom.components.ports.distributed import Group


class RowSums(TensorParallel):
    """
    A module that computes something of whole rows of tokens.

    `context` ranks have other tokens of the same rows. Several tensor `ranks` split those of this context part, so that
    what belongs to tokens comes as (tokens, ...), padded, and otherwise as (rows, length, ...). Weights of tokens,
    float32 (rows, length), are those of the context part. Without `share_rows` and `split` all tokens are here.
    """

    context: Group = SingleProcess()

    def row_weights(self, weights: Tensor) -> Tensor:
        """The sum of the weights (rows, length) over each whole row, float64 (rows,)."""
        return _total(weights.sum(1, dtype=torch.float64), [self.context])

    def row_counts(self, chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
        """
        How many choices of a whole row's tokens fell on each expert, float32 (rows, experts).

        chosen: int64 (..., choices); only the shape of the weights (rows, length) is used.
        """
        rows, length = weights.shape
        row = self._row_of_tokens(rows, length, chosen.device)
        slots = (row.unsqueeze(-1) * experts + chosen.flatten(0, -2)).flatten()
        found = torch.zeros((rows + 1) * experts, device=chosen.device)
        found.scatter_add_(0, slots, found.new_ones(()).expand_as(slots))
        return _total(found.view(rows + 1, experts)[:rows], [self.context, self.ranks.group])

    def of_tokens(self, values: Tensor, weights: Tensor) -> Tensor:
        """Values of rows (rows, ...) for each of this rank's tokens: (tokens, ...), 0 for padded, or (rows, 1, ...)."""
        if self.ranks.size == 1:
            return values.unsqueeze(1)
        padded = torch.cat([values, torch.zeros_like(values[:1])])
        rows, length = weights.shape
        return padded[self._row_of_tokens(rows, length, values.device)]

    def row_length(self, weights: Tensor) -> int:
        """The length of whole rows, of which this rank has weights (rows, length)."""
        return weights.shape[1] * self.context.size

    def _row_of_tokens(self, rows: int, length: int, device: torch.device) -> Tensor:
        """The row of each of this rank's tokens, int64 (tokens,); for those that are padded, `rows`."""
        each = -(-rows * length // self.ranks.size)
        first = self.ranks.group.rank * each
        return (torch.arange(first, first + each, device=device) // max(length, 1)).clamp_max(rows)


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
