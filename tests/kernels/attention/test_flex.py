"""flex_attention with block masks, against eager attention with a dense mask."""

import pytest
import torch

from drawloom.kernels.attention.cudnn import CUDNN
from drawloom.kernels.attention.eager import (
    EAGER,
    AttentionImplementation,
    attention_eager,
    create_causal_document_mask,
)
from drawloom.kernels.attention.flash import VARLEN
from drawloom.kernels.attention.flex import FLEX, _convert_to_dense_mask, attention_flex, create_document_block_mask
from drawloom.kernels.attention.options import PLAIN_ATTENTION, AttentionOptions
from drawloom.kernels.attention.tree import TREE

IMPLEMENTATIONS = {"eager": EAGER, "cudnn": CUDNN, "flex": FLEX, "varlen": VARLEN, "tree": TREE}
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.mark.parametrize(
    ("length", "kv_heads", "heads", "often"), [(300, 2, 2, 0.02), (129, 1, 3, 0.5), (64, 2, 4, 0.1)]
)
def test_flex_attention_equals_eager(length: int, kv_heads: int, heads: int, often: float) -> None:
    """With long and short documents, over several blocks or a part of one, the result equals the dense mask's."""
    document_ids = (torch.rand(2, length) < often).cumsum(1)
    q, k, v = (torch.randn(2, length, count, 8) for count in (heads, kv_heads, kv_heads))
    with torch.no_grad():
        actual = attention_flex(q, k, v, create_document_block_mask(document_ids))
    torch.testing.assert_close(
        actual, attention_eager(q, k, v, create_causal_document_mask(document_ids)), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("has_sinks", [True, False])
def test_options_and_sinks_equal_eager(softcap: float | None, has_sinks: bool) -> None:
    """With a scale, a softcap, sinks and narrow values, packed rows with a window have the eager result."""
    document_ids = (torch.rand(2, 150) < 0.05).cumsum(1)
    q, k, v = torch.randn(2, 150, 4, 8), torch.randn(2, 150, 2, 8), torch.randn(2, 150, 2, 5)
    options, sinks = AttentionOptions(0.7, softcap), torch.randn(4) if has_sinks else None
    with torch.no_grad():
        actual = attention_flex(q, k, v, create_document_block_mask(document_ids, 20), options, sinks)
    expected = attention_eager(q, k, v, create_causal_document_mask(document_ids, 20), options, sinks)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_document_ids_can_be_in_any_order() -> None:
    """Document ids need not increase."""
    document_ids = torch.tensor([7, 3, 9, 3, 1]).repeat_interleave(60)[None]
    q, k, v = (torch.randn(1, 300, 2, 8) for _ in "qkv")
    with torch.no_grad():
        actual = attention_flex(q, k, v, create_document_block_mask(document_ids))
    torch.testing.assert_close(
        actual, attention_eager(q, k, v, create_causal_document_mask(document_ids)), atol=1e-5, rtol=1e-5
    )


def test_fully_masked_blocks_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """With documents of two blocks, a block attends to itself in part, and to its document's first block in full."""
    monkeypatch.setattr("drawloom.kernels.attention.flex.BLOCK", 16)
    mask = create_document_block_mask(torch.arange(3).repeat_interleave(32)[None])
    assert mask.kv_num_blocks.flatten().tolist() == [1] * 6
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.flatten().tolist() == [0, 1] * 3


@pytest.mark.parametrize("attention", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_meta_tensors_give_the_shapes(attention: AttentionImplementation) -> None:
    """Meta tensors, also with sinks and narrow values, give results and gradients of the right shapes."""
    q, k, v, sinks = (
        torch.empty(shape, device="meta", requires_grad=True)
        for shape in ((2, 300, 4, 8), (2, 300, 2, 8), (2, 300, 2, 5), (4,))
    )
    mask = attention.mask(torch.empty(2, 300, dtype=torch.int64, device="meta"))
    for parameter in (None, sinks):
        actual = attention.attend(q, k, v, mask, PLAIN_ATTENTION, parameter)
        assert actual.is_meta and actual.shape == (2, 300, 4, 5)
        inputs = [q, k, v] if parameter is None else [q, k, v, parameter]
        grads = torch.autograd.grad(actual, inputs, actual.detach())
        assert [grad.shape for grad in grads] == [x.shape for x in inputs]


@pytest.mark.parametrize("window", [None, 1, 2, 15, 16, 17, 18, 31, 32, 33, 48, 100, 400])
def test_block_mask_equals_the_dense_mask(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By token and by block, the block mask allows the same keys as the eager implementation's mask."""
    monkeypatch.setattr("drawloom.kernels.attention.flex.BLOCK", 16)
    document_ids = (torch.rand(2, 304) < 0.02).cumsum(1)
    mask, dense = create_document_block_mask(document_ids, window), create_causal_document_mask(document_ids, window)
    assert torch.equal(_convert_to_dense_mask(mask), dense)
    blocks = dense.view(2, 19, 16, 19, 16).transpose(2, 3)
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    for row, query in ((row, query) for row in range(2) for query in range(19)):
        full = mask.full_kv_indices[row, 0, query, : mask.full_kv_num_blocks[row, 0, query]].tolist()
        part = mask.kv_indices[row, 0, query, : mask.kv_num_blocks[row, 0, query]].tolist()
        assert bool(blocks[row, query, full].all()), "a block is computed without a mask that it needs"
        seen = blocks[row, query].flatten(1).any(-1).nonzero().flatten().tolist()
        assert sorted([*full, *part]) == seen, "a block is left out, or computed in vain"


@pytest.mark.gpu
def test_heads_too_small_for_torch_are_computed() -> None:
    """Heads without a GPU kernel in torch give the eager result."""
    document_ids = (torch.rand(2, 300) < 0.02).cumsum(1).cuda()
    q, k, v = (torch.randn(2, 300, 4, 8, device="cuda", requires_grad=True) for _ in "qkv")
    actual, expected = (
        attention_flex(q, k, v, create_document_block_mask(document_ids)),
        attention_eager(q, k, v, create_causal_document_mask(document_ids)),
    )
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_compiled_gradients_equal_eager(kv_heads: int) -> None:
    """Compiled results and gradients equal attention with a dense mask."""
    document_ids = (torch.rand(2, 300) < 0.02).cumsum(1).cuda()
    q = torch.randn(2, 300, 4, 64, device="cuda", requires_grad=True)
    k, v = (torch.randn(2, 300, kv_heads, 64, device="cuda", requires_grad=True) for _ in "kv")
    actual, expected = (
        attention_flex(q, k, v, create_document_block_mask(document_ids)),
        attention_eager(q, k, v, create_causal_document_mask(document_ids)),
    )
    torch.testing.assert_close(actual, expected, atol=0.01, rtol=0.01)
    grads = torch.autograd.grad(actual.sum(), (q, k, v))
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), (q, k, v)), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("window", [None, 20])
def test_some_queries_get_their_rows_of_the_mask(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For positions from both ends of a row, masks and results equal these rows in the whole mask and result."""
    monkeypatch.setattr("drawloom.kernels.attention.flex.BLOCK", 16)
    document_ids = (torch.rand(2, 128) < 0.03).cumsum(1)
    queries = torch.cat([torch.arange(24), torch.arange(104, 128)])
    dense = create_causal_document_mask(document_ids, window)[:, :, queries]
    assert torch.equal(create_causal_document_mask(document_ids, window, queries), dense)
    mask = create_document_block_mask(document_ids, window, queries)
    assert torch.equal(_convert_to_dense_mask(mask), dense)
    q, k, v = (torch.randn(2, 128, 2, 8) for _ in "qkv")
    with torch.no_grad():
        actual = attention_flex(q[:, queries], k, v, mask)
    torch.testing.assert_close(actual, attention_eager(q[:, queries], k, v, dense), atol=1e-5, rtol=1e-5)
