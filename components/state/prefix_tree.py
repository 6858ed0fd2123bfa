"""Layout for texts that share a beginning: packed rows in which its tokens are computed once."""

from typing import NamedTuple

import torch
from torch import Tensor


class PrefixTree(NamedTuple):
    """
    Layout for texts (rows, length) in trees, one tree per packed row.

    `sources`, int64 (trees, width), are the packed tokens' indices in the flattened texts, and `document_ids`, int64
    (trees, width), tell who sees them; `padding`, bool (trees, width), is true where there is no token. Tokens with a
    target have the indices `trained`, int64 (tokens,), in the flattened trees, and `origins` in the flattened texts.
    """

    sources: Tensor
    document_ids: Tensor
    padding: Tensor
    trained: Tensor
    origins: Tensor

    def pack(self, values: Tensor) -> Tensor:
        """Return the packed tokens' values, (trees, width, ...), from (rows, length, ...); padding has any value."""
        return values.flatten(0, 1)[self.sources]

    def pack_trained(self, values: Tensor) -> Tensor:
        """Return values (1, tokens) for tokens with a target, from values (rows, length)."""
        return values.flatten()[self.origins][None]

    def select_trained(self, hidden: Tensor) -> Tensor:
        """Return hidden states (1, tokens, hidden_size) for tokens with a target, from (trees, width, hidden_size)."""
        return hidden.flatten(0, 1).index_select(0, self.trained)[None]

    def unpack_trained(self, values: Tensor, like: Tensor) -> Tensor:
        """Return values shaped as `like`, (rows, length), from values (1, tokens) for tokens with a target; else 0."""
        return values.new_zeros(like.numel()).index_copy(0, self.origins, values[0]).view_as(like)


class PrefixGroups(NamedTuple):
    """
    Groups with `group_size` texts in succession, which share the tokens before `starts`, int64 (rows,).

    `is_target` is bool (rows, length). A text ends at its last target; without one it is left out.
    """

    is_target: Tensor
    starts: Tensor
    group_size: int

    @property
    def stops(self) -> Tensor:
        """Return the index behind a row's last target, 0 without one: int64 (rows,)."""
        return (self.is_target * torch.arange(1, self.is_target.shape[1] + 1)).amax(1)

    def measure_longest_tree(self) -> int:
        """Return the longest tree's token count."""
        branches = (self.stops - self.starts).clamp_min(0).view(-1, self.group_size).sum(1)
        return int((branches + self.starts[:: self.group_size] * (branches > 0)).max())

    def create_tree(self, width: int) -> PrefixTree:
        """Lay out every group's texts in a row with `width` tokens."""
        rows, length = self.is_target.shape
        shape = rows // self.group_size, width
        sources, padding = torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.bool)
        document_ids = -torch.arange(1, width + 1).repeat(len(sources), 1)  # padding is seen by itself
        starts, stops = self.starts.tolist(), self.stops.tolist()
        for tree, first_row in enumerate(range(0, rows, self.group_size)):
            branches = [row for row in range(first_row, first_row + self.group_size) if stops[row] > starts[row]]
            spans = [(row, starts[row], stops[row]) for row in branches]
            if branches:
                spans.insert(0, (branches[0], 0, starts[branches[0]]))
            begin, total = 0, sum(stop - first for _, first, stop in spans)
            for number, (row, first, stop) in enumerate(spans):
                end = begin + stop - first
                sources[tree, begin:end] = torch.arange(row * length + first, row * length + stop)
                document_ids[tree, begin:end] = -end if number else -total
                padding[tree, begin:end] = False
                begin = end
        has_target = (self.is_target.flatten()[sources] & ~padding).flatten()
        trained = has_target.nonzero()[:, 0] if has_target.any() else torch.zeros(1, dtype=torch.int64)
        return PrefixTree(sources, document_ids, padding, trained, sources.flatten()[trained])


MIN_WIDTH_STEP = 16
"""Least difference between two widths of packed rows."""


def round_width_up(tokens: int) -> int:
    """Round `tokens` up to a multiple: a quarter of the next lower power of two."""
    step = max(MIN_WIDTH_STEP, 1 << max(tokens.bit_length() - 3, 0))
    return max(-(-tokens // step) * step, step)
