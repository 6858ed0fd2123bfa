"""Sums over whole token rows, divided among context and tensor parallel ranks."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.parallel.tensor_ranks import TensorParallel
from drawloom.ports import Group


class RowSums(TensorParallel):
    """
    A module with sums over whole token rows.

    Ranks of `context` have other tokens of the same rows. If several tensor `ranks` split this rank's context part,
    token values are (tokens, ...), padded at the end; otherwise they are (rows, length, ...). Token weights, float32
    (rows, length), cover the context part. Without `set_context_group` and `split`, this rank has all tokens.
    """

    context: Group = SingleProcess()

    def sum_row_weights(self, weights: Tensor) -> Tensor:
        """Sum the weights (rows, length) over whole rows: float64 (rows,)."""
        return _all_reduce_in_place(weights.sum(1, dtype=torch.float64), [self.context])

    def count_row_choices_over_ranks(
        self, chosen: Tensor, weights: Tensor, experts: int, is_token: Tensor | None = None
    ) -> Tensor:
        """
        Count choices by whole row and expert: float32 (rows, experts).

        chosen: int64 (tokens, choices) or (rows, length, choices); only the weights' shape (rows, length) is used;
        is_token: float32 (tokens,) or (rows, length), 0 for tokens that do not count; default: all count.
        """
        slots = self.remove_padding(chosen, weights) + experts * self._find_row_of_tokens(weights).unsqueeze(1)
        counts = torch.zeros(len(weights) * experts, device=chosen.device)
        ones = counts.new_ones(()) if is_token is None else is_token.flatten()[: len(slots)].unsqueeze(1)
        counts.scatter_add_(0, slots.flatten(), ones.expand(slots.shape).flatten())
        return _all_reduce_in_place(counts.view(-1, experts), [self.context, self.ranks.group])

    def repeat_by_token(self, values: Tensor, weights: Tensor) -> Tensor:
        """Repeat row values (rows, ...) for this rank's tokens: (tokens, ...), 0 in padding, or (rows, 1, ...)."""
        if self.ranks.size == 1:
            return values.unsqueeze(1)
        return self._pad_to_equal_share(values[self._find_row_of_tokens(weights)], weights)

    def select_own_token_weights(self, weights: Tensor) -> Tensor:
        """Select this rank's token weights from (rows, length): (tokens,), 0 in padding, or (rows, length)."""
        if self.ranks.size == 1:
            return weights
        own = self._find_own_tokens(weights)
        return self._pad_to_equal_share(weights.flatten()[own.start : own.stop], weights)

    def remove_padding(self, values: Tensor, weights: Tensor) -> Tensor:
        """Remove padding from values (tokens, n) or (rows, length, n): (tokens, n)."""
        return values.flatten(0, -2)[: len(self._find_own_tokens(weights))]

    def _find_own_tokens(self, weights: Tensor) -> range:
        """Return this rank's token indices among the context part's tokens, in row order."""
        share = -(-weights.numel() // self.ranks.size)
        first = self.ranks.group.rank * share
        return range(min(first, weights.numel()), min(first + share, weights.numel()))

    def _find_row_of_tokens(self, weights: Tensor) -> Tensor:
        """Return the row number of every token on this rank: int64 (tokens,)."""
        own = self._find_own_tokens(weights)
        return torch.arange(own.start, own.stop, device=weights.device) // max(weights.shape[1], 1)

    def _pad_to_equal_share(self, values: Tensor, weights: Tensor) -> Tensor:
        """Append zeros to values of this rank's tokens, up to the equal share of all ranks."""
        missing = -(-weights.numel() // self.ranks.size) - len(values)
        return F.pad(values, (0, 0) * (values.ndim - 1) + (0, missing))


def set_context_group(module: nn.Module, context: Group) -> None:
    """Set the ranks with other tokens of the same rows on every RowSums in a module."""
    for submodule in module.modules():
        if isinstance(submodule, RowSums):
            submodule.context = context


def _all_reduce_in_place(local: Tensor, groups: Sequence[Group]) -> Tensor:
    """All-reduce a tensor (any shape) over several groups, in place."""
    if not local.is_meta:
        for group in groups:
            group.sum(local)
    return local
