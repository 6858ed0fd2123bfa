"""Attention in blocks in Triton against plain attention."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from drawloom.kernels.attention.eager import EAGER, attention_eager, create_causal_document_mask, create_causal_mask
from drawloom.kernels.attention.options import PLAIN_ATTENTION, AttentionOptions
from drawloom.kernels.batch_invariant.triton import BlockMask, attend_in_blocks_triton, create_block_attention
from support.kernels import DEVICE, draw_tensor

CASES: dict[str, tuple[Any, ...]] = {
    "plain": ("transposed", 6, 2, 16, 16, None, PLAIN_ATTENTION, False),
    "window": ("sliced", 3, 1, 20, 24, 40, PLAIN_ATTENTION, False),
    "capped": ("contiguous", 2, 1, 8, 8, None, AttentionOptions(softcap=5.0, scale=0.3), True),
    "wide": ("contiguous", 2, 2, 144, 144, 70, PLAIN_ATTENTION, True),
}
"""Layout in memory, heads, heads of keys, channels of keys and values, window, options, and whether there are sinks."""

LENGTH = 150


@pytest.mark.parametrize("name", CASES)
def test_triton_equals_plain_attention(name: str) -> None:
    """
    Results and gradients are plain attention's: packed documents, whole rows, and the last tokens after a cache.

    Keys behind a count on the device are not read.
    """
    layout, heads, kv_heads, width, v_width, window, options, has_sinks = CASES[name]
    shapes = ((heads, width), (kv_heads, width), (kv_heads, v_width))
    q, k, v = (draw_tensor(layout, 2, LENGTH, *shape) for shape in shapes)
    sinks = draw_tensor("contiguous", heads) if has_sinks else None
    blocks, inputs = create_block_attention(EAGER), [x for x in (q, k, v, sinks) if x is not None]
    documents = (torch.arange(LENGTH, device=DEVICE) // 47).expand(2, -1)
    ours = blocks.attend(q, k, v, blocks.mask(documents, window), options, sinks)
    plain = attention_eager(q, k, v, create_causal_document_mask(documents, window), options, sinks)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(mixed.sin().sum(), inputs) for mixed in (ours, plain)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    for queries in (LENGTH, 40, 1):
        ours = attend_in_blocks_triton(q[:, -queries:], k, v, BlockMask(None, window), options, sinks)
        mask = create_causal_mask(queries, LENGTH, window, DEVICE)
        plain = attention_eager(q[:, -queries:], k, v, mask, options, sinks)
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    long_k, long_v = (F.pad(x, (0, 0, 0, 0, 0, 70), value=float("nan")) for x in (k, v))
    counted = BlockMask(None, window, key_count=torch.tensor(LENGTH, device=DEVICE))
    assert attend_in_blocks_triton(q[:, -1:], long_k, long_v, counted, options, sinks).equal(ours)


def test_half_precision_rounds_once() -> None:
    """bfloat16 results are plain attention's to the rounding of the weights, also without rows."""
    q, k, v = (draw_tensor("contiguous", 2, 70, heads, 32, dtype=torch.bfloat16) for heads in (4, 2, 2))
    ours = attend_in_blocks_triton(q, k, v, BlockMask(None, None))
    plain = attention_eager(q.double(), k.double(), v.double(), create_causal_mask(70, 70, None, DEVICE))
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), plain, rtol=1e-2, atol=1e-2)
    assert attend_in_blocks_triton(q[:0], k[:0], v[:0], BlockMask(None, None)).shape == (0, 70, 4, 32)


def test_queries_of_a_part_are_refused() -> None:
    """Attention in blocks has no mask for some of a row's queries."""
    with pytest.raises(ValueError, match="whole rows"):
        create_block_attention(EAGER).mask(torch.zeros(1, 8), None, torch.arange(4))
