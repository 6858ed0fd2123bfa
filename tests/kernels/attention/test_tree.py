"""Attention in trees of texts, against the texts in rows of their own."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from drawloom.components.state.prefix_tree import PrefixGroups, PrefixTree
from drawloom.kernels.attention.eager import create_causal_document_mask
from drawloom.kernels.attention.flex import attention_flex
from drawloom.kernels.attention.options import PLAIN_ATTENTION, AttentionOptions
from drawloom.kernels.attention.tree import attend_to_tree, create_reader_test, create_tree_mask

ROWS, LENGTH, GROUP = 8, 60, 4


def draw_tree() -> tuple[Tensor, Tensor, PrefixTree]:
    """Return targets (rows, length), starts (rows,) and the tree; two texts and the second group's have no target."""
    starts = torch.tensor([20, 33]).repeat_interleave(GROUP)
    stops = starts + torch.randint(1, 25, (ROWS,))
    columns = torch.arange(LENGTH)
    is_target = (columns >= starts[:, None]) & (columns < stops[:, None]) & (torch.rand(ROWS, LENGTH) < 0.8)
    is_target[torch.arange(ROWS), stops - 1] = True
    is_target[1] = is_target[6] = False
    groups = PrefixGroups(is_target, starts, GROUP)
    return is_target, starts, groups.create_tree(groups.measure_longest_tree() + 3)


@pytest.mark.parametrize("window", [None, 1, 9])
def test_a_target_sees_its_own_text(window: int | None) -> None:
    """Every target of the texts is packed once, and sees its text's tokens up to itself, and no others."""
    is_target, _, tree = draw_tree()
    mask = create_tree_mask(tree.document_ids, window)
    seen = {}
    for packed, origin in zip(tree.trained.tolist(), tree.origins.tolist(), strict=True):
        index = divmod(packed, tree.sources.shape[1])
        columns = tree.sources[index[0]][mask[index[0], 0, index[1]]] % LENGTH
        last = origin % LENGTH
        assert columns.tolist() == [*range(0 if window is None else max(0, last + 1 - window), last + 1)]
        seen[origin] = int(tree.sources[index])
    assert [*seen] == [*seen.values()] == is_target.flatten().nonzero()[:, 0].tolist()
    assert mask.any(-1).all(), "a token that sees nothing has an undefined result"


def test_groups_without_targets_are_padding() -> None:
    """A group without a target is a row of padding, and without any target there is still one token to compute."""
    is_target, starts, _ = draw_tree()
    is_target[:GROUP] = False
    tree = PrefixGroups(is_target, starts, GROUP).create_tree(200)
    assert tree.padding[0].all() and not tree.padding[1].all()
    nothing = PrefixGroups(torch.zeros_like(is_target), starts, GROUP)
    assert nothing.measure_longest_tree() == 0 and nothing.create_tree(16).trained.tolist() == [0]


@pytest.mark.parametrize("window", [None, 1, 17, 40])
def test_ordinary_documents_have_their_own_mask(window: int | None) -> None:
    """Rows of documents in succession, which may end with the id that they begin with, have the usual mask."""
    ids = (torch.rand(2, 90) < 0.1).cumsum(1) % 5
    ids[0] = 0
    assert torch.equal(create_tree_mask(ids, window), create_causal_document_mask_of_runs(ids, window))


def create_causal_document_mask_of_runs(ids: Tensor, window: int | None) -> Tensor:
    """Return the usual mask, in which equal ids apart from each other are two documents."""
    return create_causal_document_mask((ids != ids.roll(1, 1)).index_fill(1, torch.tensor(0), False).cumsum(1), window)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_in_trees_equals_eager() -> None:
    """With a softcap and sinks, or without, attention by blocks equals attention by a dense mask."""
    ids = draw_tree()[2].document_ids
    q, k, v = (torch.randn(2, ids.shape[1], heads, 8) for heads in (4, 2, 2))
    length = ids.shape[1]
    blocks = create_block_mask(create_reader_test(ids, None, None), 2, None, length, length, device="cpu")
    for options, sinks in ((PLAIN_ATTENTION, None), (AttentionOptions(0.7, 0.5), torch.randn(4))):
        with torch.no_grad():
            actual, expected = (
                attention_flex(q, k, v, blocks, options, sinks),
                attend_to_tree(q, k, v, create_tree_mask(ids), options, sinks),
            )
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_compiled_gradients_in_trees_equal_eager() -> None:
    """On a GPU, results and gradients equal attention with a dense mask, also with a window."""
    ids = draw_tree()[2].document_ids
    q, k, v = (torch.randn(2, ids.shape[1], heads, 64, device="cuda", requires_grad=True) for heads in (4, 2, 2))
    for window in (None, 9):
        actual = attend_to_tree(q, k, v, create_tree_mask(ids.cuda(), window))
        expected = attend_to_tree(q, k, v, create_tree_mask(ids, window).cuda())
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        grad = torch.randn_like(actual)
        ours, theirs = (torch.autograd.grad(value, (q, k, v), grad) for value in (actual, expected))
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
