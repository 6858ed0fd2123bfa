"""Batch-invariant operations: attention in blocks, and products with few rows."""

from functools import partial

import pytest
import torch
from torch import Tensor

from drawloom.components.kernels.auto import AutoKernels
from drawloom.components.kernels.batch_invariant import BatchInvariantKernels
from drawloom.components.ports.data import IGNORE_INDEX
from drawloom.kernels.attention.eager import attention_eager, create_causal_document_mask, create_causal_mask
from drawloom.kernels.attention.options import PLAIN_ATTENTION, AttentionOptions
from drawloom.kernels.batch_invariant.eager import BLOCK, apply_with_padded_rows, attend_in_blocks
from support.qwen3 import cpu_kernels

CASES = {
    "plain": (6, 2, 16, None, PLAIN_ATTENTION, False),
    "window": (4, 4, 32, 40, PLAIN_ATTENTION, False),
    "capped": (2, 1, 8, None, AttentionOptions(softcap=5.0, scale=0.3), True),
}
"""Heads, heads of keys, channels, window, options, and whether there are sinks."""


def random_case(rows: int, length: int, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    heads, kv_heads, width, _, _, has_sinks = CASES[name]
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(rows, length, count, width, generator=generator) for count in (heads, kv_heads, kv_heads))
    sinks = torch.randn(heads, generator=generator) if has_sinks else None
    return q.to(dtype), k.to(dtype), v.to(dtype), sinks


@pytest.mark.parametrize("name", CASES)
def test_attention_in_blocks_is_attention(name: str) -> None:
    """Results and gradients equal plain attention's, in rows with several documents, in float64."""
    *qkv, sinks = random_case(2, 2 * BLOCK + 7, name, torch.float64)
    *_, window, options, _ = CASES[name]
    mask = create_causal_document_mask(torch.arange(2 * BLOCK + 7).expand(2, -1) // 25, window)
    inputs = [x.double().requires_grad_() for x in (*qkv, sinks) if x is not None]
    outputs = []
    for attend in (attend_in_blocks, attention_eager):
        mixed = attend(inputs[0], inputs[1], inputs[2], mask, options, None if sinks is None else inputs[3])
        outputs.append((mixed, *torch.autograd.grad(mixed.sin().sum(), inputs)))
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_attention_has_the_same_bits_in_every_part(name: str, dtype: torch.dtype) -> None:
    """Each token alone after its cache, each prefix, and a single row have the whole pass's bits."""
    length = 2 * BLOCK + 5
    q, k, v, sinks = random_case(3, length, name, dtype)
    *_, window, options, _ = CASES[name]
    attend = partial(attend_in_blocks, options=options, sinks=sinks)
    whole = attend(q, k, v, create_causal_mask(length, length, window, q.device).expand(3, -1, -1, -1))
    for end in range(1, length + 1):
        for first, rows in ((end - 1, slice(None)), (0, slice(1)), (end // 2, slice(1, 3))):
            mask = create_causal_mask(end - first, end, window, q.device)
            part = attend(q[rows, first:end], k[rows, :end], v[rows, :end], mask)
            assert part.equal(whole[rows, first:end]), (end, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_products_do_not_depend_on_their_number(dtype: torch.dtype) -> None:
    """A row of a linear layer, and its cross entropy, have the same bits among 1 to 40, and among 500 rows."""
    generator = torch.Generator().manual_seed(1)
    for inputs, outputs in ((24, 40), (192, 257), (512, 192)):
        x, weight = (torch.randn(rows, inputs, generator=generator).to(dtype) for rows in (500, outputs))
        targets = torch.randint(outputs, (500,), generator=generator)
        targets[::7] = IGNORE_INDEX
        kernels = BatchInvariantKernels(device=cpu_kernels().device)
        whole, losses = kernels.linear(x, weight), kernels.linear_cross_entropy(x, weight, targets)
        for rows in (*range(1, 41), 63, 129):
            for first in (0, 11):
                part = slice(first, first + rows)
                assert kernels.linear(x[part], weight).equal(whole[part])
                ours = kernels.linear_cross_entropy(x[part], weight, targets[part])
                assert all(one.equal(other[part]) for one, other in zip(ours, losses, strict=True))
        torch.testing.assert_close(losses, cpu_kernels().linear_cross_entropy(x, weight, targets), rtol=1e-2, atol=1e-2)


def test_padding_of_few_rows_has_no_effect() -> None:
    """The function sees at least 16 rows, and results keep the input's shape."""
    seen = []

    def double(rows: Tensor) -> Tensor:
        seen.append(len(rows.reshape(-1, 3)))
        return 2 * rows

    for shape in ((3,), (1, 5, 3), (20, 3)):
        x = torch.randn(shape)
        assert apply_with_padded_rows(double, x).equal(2 * x)
    assert seen == [16, 16, 20]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_experts_do_not_depend_on_their_number(dtype: torch.dtype) -> None:
    """A token's experts have the same bits among few and many tokens, whatever experts these have."""
    generator = torch.Generator().manual_seed(1)
    kernels, count, width, inner = BatchInvariantKernels(device=cpu_kernels().device), 5, 48, 40
    x = torch.randn(300, width, generator=generator).to(dtype)
    up = torch.randn(count, 2 * inner, width, generator=generator).to(dtype)
    down = torch.randn(count, width, inner, generator=generator).to(dtype)
    chosen = torch.rand(300, count, generator=generator).topk(2).indices
    weights = torch.rand(300, 2, generator=generator)

    def apply(kernels: AutoKernels, part: slice) -> Tensor:
        routes = kernels.moe_routes(chosen[part], count)
        rows, scale = kernels.moe_permute(x[part], weights[part], routes)
        gated = kernels.swiglu_halves(kernels.grouped_gemm(rows, up, routes[2], transposed=True), scale)
        return kernels.moe_unpermute(kernels.grouped_gemm(gated, down, routes[2], transposed=True), routes)

    whole = apply(kernels, slice(None))
    for first, rows in ((0, 1), (7, 2), (0, 3), (50, 7), (3, 16), (100, 31), (0, 150)):
        part = slice(first, first + rows)
        assert apply(kernels, part).equal(whole[part]), (first, rows)
    torch.testing.assert_close(whole, apply(cpu_kernels(), slice(None)), rtol=1e-2, atol=2e-2)
