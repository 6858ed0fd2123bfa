"""Attention in trees of texts, against the texts in rows of their own."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from drawloom.components.state.prefix_tree import PrefixGroups
from drawloom.kernels.attention.eager import create_causal_document_mask
from drawloom.kernels.attention.flex import attention_flex
from drawloom.kernels.attention.options import PLAIN_ATTENTION, AttentionOptions
from drawloom.kernels.attention.tree import attend_to_tree, create_reader_test, create_tree_mask
from support.seeding import seeds
from support.text_trees import GROUP, draw_texts


@given(_=seeds, window=st.sampled_from([None, 1, 9]))
def test_a_target_sees_its_own_text(_: Any, window: int | None) -> None:
    """Every target has a packed token with its id, which sees its text up to itself, and nothing else."""
    texts = draw_texts()
    tree, length = texts.tree, texts.tokens.shape[1]
    mask = create_tree_mask(tree.document_ids, window)
    ids = tree.pack(texts.tokens)
    assert tree.targets.tolist() == texts.is_target.flatten().nonzero()[:, 0].tolist() or not texts.is_target.any()
    for copy, target in zip(tree.copies.tolist(), tree.targets.tolist(), strict=True):
        row, last = divmod(target, length)
        index = divmod(int(tree.trained[copy]), ids.shape[1])
        first = 0 if window is None else max(0, last + 1 - window)
        if texts.is_target[row, last]:
            assert ids[index[0]][mask[index[0], 0, index[1]]].equal(texts.tokens[row, first : last + 1])
            assert tree.pack(torch.arange(length).expand_as(texts.tokens))[index] == last
            assert texts.tokens.flatten()[tree.origins[copy] + 1] == texts.tokens[row, last + 1]
    assert texts.is_target.flatten()[tree.origins].all() or not texts.is_target.any()
    assert mask.any(-1).all(), "a token that sees nothing has an undefined result"


@given(_=seeds)
def test_equal_beginnings_of_a_group_are_packed_once(_: Any) -> None:
    """A tree has a token by beginning with the next token, and every text's last token."""
    texts = draw_texts()
    inputs = texts.list_inputs_of_texts()
    for group, padding in enumerate(texts.tree.padding):
        members = [ids for ids in inputs[group * GROUP :][:GROUP] if ids]
        beginnings = {ids[:stop] for ids in members for stop in range(2, len(ids) + 1)}
        assert int((~padding).sum()) == len(beginnings) + len(members)


def test_texts_share_only_tokens_with_equal_values() -> None:
    """A token with other routes, or its next token, ends what two texts with equal ids share."""
    tokens, is_target = torch.arange(8).expand(2, 8), torch.ones(2, 8, dtype=torch.bool)
    routes = torch.zeros(2, 8, 3, 2, dtype=torch.int32)
    routes[1, 5, 2, 1] = 1
    lengths = [
        PrefixGroups.merge(values, is_target, 2).measure_longest_tree() for values in ([tokens], [tokens, routes])
    ]
    assert lengths == [8 + 1, 8 + 4]


def test_groups_without_targets_are_padding() -> None:
    """A group without a target is a row of padding, and without any target there is still one token to compute."""
    tokens, is_target = draw_texts()[:2]
    is_target[:GROUP], is_target[GROUP] = False, True
    tree = PrefixGroups.merge([tokens], is_target, GROUP).create_tree(300)
    assert tree.padding[0].all() and not tree.padding[1].all()
    nothing = PrefixGroups.merge([tokens], torch.zeros_like(is_target), GROUP)
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
@given(_=seeds)
def test_flex_attention_in_trees_equals_eager(_: Any) -> None:
    """With a softcap and sinks, or without, attention by blocks equals attention by a dense mask."""
    ids = draw_texts().tree.document_ids
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
    ids = draw_texts().tree.document_ids
    q, k, v = (torch.randn(2, ids.shape[1], heads, 64, device="cuda", requires_grad=True) for heads in (4, 2, 2))
    for window in (None, 9):
        actual = attend_to_tree(q, k, v, create_tree_mask(ids.cuda(), window))
        expected = attend_to_tree(q, k, v, create_tree_mask(ids, window).cuda())
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        grad = torch.randn_like(actual)
        ours, theirs = (torch.autograd.grad(value, (q, k, v), grad) for value in (actual, expected))
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
