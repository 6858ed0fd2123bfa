"""
Layout for texts with common beginnings: packed rows in which a shared token is computed once.

Sorted by their ids, texts are a depth-first walk through their trie: each one continues the text before it behind their
common beginning. So a token's readers end where a text begins that branches off before this token.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor


class SharedText(NamedTuple):
    """A text's tokens in flattened texts, from `first` on; `shared` ones are computed with the text before it."""

    first: int
    length: int
    shared: int


class PackedTexts(NamedTuple):
    """
    Texts in a packed row: its tokens have the indices `sources` in the flattened texts, and are read before
    `reader_ends`, both int64 (tokens,).

    `slots` are a text's tokens in the row, int64 (length,) by text.
    """

    sources: Tensor
    reader_ends: Tensor
    slots: list[Tensor]


def pack_texts(texts: Iterable[SharedText]) -> PackedTexts:
    """Pack texts; each one continues the text before it behind the shared tokens."""
    sources, reader_ends, slots = torch.arange(0), torch.arange(0), [torch.arange(0)]
    for first, length, shared in texts:
        begin, end = len(sources), len(sources) + length - shared
        reader_ends[slots[-1][shared:]] = begin
        sources = torch.cat([sources, torch.arange(first + shared, first + length)])
        reader_ends = torch.cat([reader_ends, torch.full((end - begin,), end)])
        slots.append(torch.cat([slots[-1][:shared], torch.arange(begin, end)]))
    reader_ends[slots[-1]] = len(sources)
    return PackedTexts(sources, reader_ends, slots[1:])


def count_common_tokens(one: Tensor, other: Tensor) -> int:
    """Count the equal tokens at two texts' beginnings, (length, ...) with at least one token."""
    length = min(len(one), len(other))
    is_equal = (one[:length] == other[:length]).reshape(length, -1).all(1)
    return int(is_equal.long().cumprod(0).sum())


class TreeRows(NamedTuple):
    """
    Packed rows: `sources`, int64 (rows, width), as in `PackedTexts`; 0 where `padding`, bool (rows, width), is true.

    `document_ids`, int64 (rows, width), are for attention in trees; padding is seen by itself.
    """

    sources: Tensor
    document_ids: Tensor
    padding: Tensor


def create_tree_rows(packed: Sequence[PackedTexts], width: int) -> TreeRows:
    """Pad packed rows to `width` tokens."""
    sources, padding = (
        torch.zeros(len(packed), width, dtype=torch.int64),
        torch.ones(len(packed), width, dtype=torch.bool),
    )
    document_ids = -torch.arange(1, width + 1).repeat(len(packed), 1)
    for row, texts in enumerate(packed):
        count = len(texts.sources)
        sources[row, :count], document_ids[row, :count] = texts.sources, -texts.reader_ends
        padding[row, :count] = False
    return TreeRows(sources, document_ids, padding)


class PrefixTree(NamedTuple):
    """
    Layout for texts (rows, length) in trees, one tree per packed row.

    `sources`, int64 (trees, width), are the packed tokens' indices in the flattened texts, and `document_ids`, int64
    (trees, width), tell who sees them; `padding`, bool (trees, width), is true where there is no token. Tokens with a
    target have the indices `trained`, int64 (tokens,), in the flattened trees, and `origins`, int64 (tokens,), in one
    text that has them. All texts' targets have the indices `targets`, int64 (targets,), in the flattened texts, and
    `copies`, int64 (targets,), in `trained`.
    """

    sources: Tensor
    document_ids: Tensor
    padding: Tensor
    trained: Tensor
    origins: Tensor
    targets: Tensor
    copies: Tensor

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
        # The gradient of indexing adds the copies' gradients in a fixed order; that of index_select does not.
        copies = values[0][self.copies]
        return values.new_zeros(like.numel()).index_copy(0, self.targets, copies).view_as(like)


class PrefixGroups(NamedTuple):
    """
    Groups with common beginnings, sorted as in their trie; `is_target` is bool (rows, length).

    A text ends at its last target; without one it is left out. Texts share a token if the next one is equal, too: then
    it has one target in all texts.
    """

    is_target: Tensor
    groups: list[list[SharedText]]

    @classmethod
    def merge(cls, values: Sequence[Tensor], is_target: Tensor, group_size: int) -> Self:
        """
        Group every `group_size` consecutive texts, sorted as in their trie.

        values: (rows, length, ...), first the ids; equal tokens have all values equal.
        """
        length, ids = is_target.shape[1], values[0].tolist()
        stops = (is_target * torch.arange(1, length + 1)).amax(1).tolist()
        groups = []
        for first_row in range(0, len(ids), group_size):
            rows = [row for row in range(first_row, first_row + group_size) if stops[row]]
            rows.sort(key=lambda row: ids[row][: stops[row]])
            texts = [[tensor[row, : stops[row]] for tensor in values] for row in rows]
            common_lengths = [0, *(min(map(count_common_tokens, *pair)) for pair in pairwise(texts))]
            pairs = zip(rows, common_lengths, strict=False)  # a group without targets has no rows
            # The last common token has another target in each text, so it is not shared.
            groups.append([SharedText(row * length, stops[row], max(common - 1, 0)) for row, common in pairs])
        return cls(is_target, groups)

    def measure_longest_tree(self) -> int:
        """Return the longest tree's token count."""
        return max(sum(text.length - text.shared for text in group) for group in self.groups)

    def create_tree(self, width: int) -> PrefixTree:
        """Lay out every group's texts in a row with `width` tokens."""
        packed = [*map(pack_texts, self.groups)]
        rows = create_tree_rows(packed, width)
        slots = torch.zeros(self.is_target.numel(), dtype=torch.int64)
        for tree, texts in enumerate(self.groups):
            for text, own_slots in zip(texts, packed[tree].slots, strict=True):
                slots[text.first : text.first + text.length] = own_slots + tree * width
        has_target = self.is_target.flatten()
        targets = has_target.nonzero()[:, 0] if has_target.any() else torch.zeros(1, dtype=torch.int64)
        trained, copies = torch.unique(slots[targets], return_inverse=True)
        origins = torch.empty_like(trained).scatter(0, copies, targets)
        return PrefixTree(**rows._asdict(), trained=trained, origins=origins, targets=targets, copies=copies)


MIN_WIDTH_STEP = 16
"""Least difference between two widths of packed rows."""


def round_width_up(tokens: int) -> int:
    """Round `tokens` up to a multiple: a quarter of the next lower power of two."""
    step = max(MIN_WIDTH_STEP, 1 << max(tokens.bit_length() - 3, 0))
    return max(-(-tokens // step) * step, step)
