"""Random texts with common beginnings."""

from typing import NamedTuple

import torch
from torch import Tensor

from drawloom.components.state.prefix_tree import PrefixGroups, PrefixTree

GROUP = 4
"""Texts in a group."""


class DrawnTexts(NamedTuple):
    """Ids int64 (rows, length), where there are targets, bool (rows, length), and a layout for them."""

    tokens: Tensor
    is_target: Tensor
    tree: PrefixTree

    def list_inputs_of_texts(self) -> list[tuple[int, ...]]:
        """Return every text's ids up to its last target."""
        stops = (self.is_target * torch.arange(1, self.is_target.shape[1] + 1)).amax(1).tolist()
        return [tuple(ids[:stop].tolist()) for ids, stop in zip(self.tokens, stops, strict=True)]


def draw_texts(groups: int = 2, length: int = 60, share: float = 0.8) -> DrawnTexts:
    """
    Return groups in which a text begins like an earlier one and goes on with two random ids.

    Some tokens have targets; one text in four has none, and a text may end inside another one.
    """
    tokens = torch.randint(29, (groups * GROUP, length))
    for row in range(len(tokens)):
        if row % GROUP:
            earlier = int(torch.randint(row - row % GROUP, row, ()))
            common = int(torch.randint(length, ()))
            tokens[row, :common] = tokens[earlier, :common]
            tokens[row, common:] %= 2
    stops = torch.randint(1, length, (len(tokens), 1))
    is_target = (torch.arange(length) < stops) & (torch.rand(tokens.shape) < share)
    is_target.scatter_(1, stops - 1, True)
    is_target &= torch.rand(len(tokens), 1) < 0.75
    parts = PrefixGroups.merge([tokens], is_target, GROUP)
    return DrawnTexts(tokens, is_target, parts.create_tree(parts.measure_longest_tree() + 3))
