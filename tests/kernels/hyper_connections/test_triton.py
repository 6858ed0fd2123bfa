"""Hyper-connections in Triton against the eager ones in float64, which are tested against the papers' formulas."""

from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.kernels.hyper_connections.eager import connect_streams_eager
from drawloom.kernels.hyper_connections.triton import connect_streams_triton
from support.kernels import DEVICE, assert_all_close, exact

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((1, 4, 5), (2, 3, 70), (37, 2, 64), (5, 1, 130), (3, 8, 33), (17, 4, 128))
"""Tokens, streams and channels."""


def draw(tokens: int, count: int, width: int, dtype: torch.dtype, constrained: bool) -> list[Tensor]:
    """Return streams, a branch's output, its weights, and the next branch's parameters."""
    shape = (count * (count + 2), count * width) if constrained else (count + 2, width)
    drawn = torch.randn(tokens, count, width), torch.randn(tokens, width), torch.randn(tokens, count + 2, count)
    weights = torch.randn(count), torch.randn(count), torch.randn(count, count), torch.randn(2 + constrained)
    tensors = *drawn, torch.randn(shape) / shape[1] ** 0.5, *weights
    return [
        tensor.to(DEVICE, torch.float32 if number == 2 else dtype).requires_grad_()
        for number, tensor in enumerate(tensors)
    ]


def connect(function: Any, inputs: Any, writes: bool, reads: bool, constrained: bool) -> list[Tensor]:
    """Return the results with elements."""
    streams, output, before, *parameters = inputs
    connection = (*parameters, 0.1, streams.shape[1] - 1, constrained) if reads else None
    results = function(streams, *(output, before) if writes else (None, None), connection)
    return [result for result in results if result.numel()]


def compare(shape: tuple[int, int, int], dtype: torch.dtype, writes: bool, reads: bool, constrained: bool) -> None:
    """Compare results and every gradient with float64."""
    inputs = draw(*shape, dtype, constrained)
    used = inputs[:1] + inputs[1:3] * writes + inputs[3:] * reads
    wide = exact(*inputs)
    wide_used = [wide[next(i for i, x in enumerate(inputs) if x is tensor)] for tensor in used]
    actual = connect(connect_streams_triton, inputs, writes, reads, constrained)
    expected = connect(connect_streams_eager, wide, writes, reads, constrained)
    bound = 8.0 if dtype == torch.bfloat16 else 200.0
    assert_all_close([x.to(dtype) for x in actual], expected, bound)
    seeds = [torch.randn_like(x) for x in actual]
    grads = torch.autograd.grad(actual, used, seeds)
    assert [grad.dtype for grad in grads] == [x.dtype for x in used]
    wanted = torch.autograd.grad(expected, wide_used, [x.double() for x in seeds])
    assert_all_close([grad.to(dtype) for grad in grads], wanted, bound)


CASES = [
    (shape, dtype, constrained, writes, reads)
    for constrained in (False, True)
    for writes, reads in ((False, True), (True, True), (True, False))
    for shape, dtype in zip(SHAPES, cycle(DTYPES), strict=False)
    # A single stream can't be constrained: its initial weight to read is 1. Without a next branch nothing is.
    if not constrained or (reads and shape[1] > 1)
]


@pytest.mark.parametrize(("shape", "dtype", "constrained", "writes", "reads"), CASES)
def test_triton_equals_eager(
    shape: tuple[int, int, int], dtype: torch.dtype, constrained: bool, writes: bool, reads: bool
) -> None:
    """At a layer's begin, inside of it and at its end, results and all gradients are as in float64."""
    compare(shape, dtype, writes, reads, constrained)


@pytest.mark.parametrize("constrained", [False, True])
def test_tokens_do_not_depend_on_later_ones(constrained: bool) -> None:
    """A row's first tokens have the same bits before any number of other tokens, and in every call."""
    inputs = draw(19, 4, 40, torch.bfloat16, constrained)
    part = [*(x[:5] for x in inputs[:3]), *inputs[3:]]
    whole, ours = (connect(connect_streams_triton, x, True, True, constrained) for x in (inputs, part))
    assert all(torch.equal(x[:5], y) for x, y in zip(whole, ours, strict=True))


@pytest.mark.parametrize("constrained", [False, True])
def test_streams_may_share_memory(constrained: bool) -> None:
    """Streams in the same memory, as at the first layer, have the results and the gradients of copies."""
    inputs = draw(7, 4, 24, torch.float32, constrained)
    leaf = inputs[0].detach()[:, :1].requires_grad_()
    results = []
    for streams in (leaf.expand(-1, 4, -1), leaf.expand(-1, 4, -1).contiguous()):
        connected = connect(connect_streams_triton, [streams, *inputs[1:]], False, True, constrained)
        total = torch.stack([x.square().sum() for x in connected]).sum()
        results.append([*connected, *torch.autograd.grad(total, [leaf, *inputs[3:]])])
    assert_all_close(results[0], [x.double() for x in results[1]], 8)
