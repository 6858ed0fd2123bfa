"""Rows with shared texts; `tests/kernels/attention/test_tree.py` tests their layout."""

import torch

from drawloom.components.ports.rollouts import PolicyBatch
from drawloom.components.state.prefix_tree import PrefixGroups, round_width_up
from drawloom.kernels.attention.tree import create_tree_mask


def test_a_policy_batch_counts_the_keys_of_its_tree() -> None:
    """Its tokens see as many keys as the tree's mask has."""
    ids = torch.zeros(4, 9, dtype=torch.int64)
    is_target = torch.arange(9) >= torch.tensor([[3], [3], [5], [5]])
    tokens = torch.tensor([3, 3, 5, 5])[:, None] + torch.arange(9) // 4 * torch.arange(4)[:, None]
    tree = PrefixGroups.merge([tokens], is_target, 2).create_tree(16)
    batch = PolicyBatch(ids, ids, ids, ids, is_target.float(), tree=tree)
    seen = create_tree_mask(tree.document_ids).sum(-1).squeeze(1)
    assert batch.visible_keys.shape == (2, 16) and batch.visible_keys[~tree.padding].equal(seen[~tree.padding])


def test_few_widths_are_used() -> None:
    """A width has room for the tokens, with less than a quarter of padding from 64 on; there are few to compile for."""
    widths = [round_width_up(tokens) for tokens in range(1, 8193)]
    assert all(0 <= width - tokens < max(tokens / 4, 16) for tokens, width in enumerate(widths, 1))
    assert len({*widths[4096:]}) == 4 and round_width_up(0) == 16
