"""Hyper-connections in Triton against the eager ones in float64, which are tested against the papers' formulas."""

from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.kernels.hyper_connections.eager import Connection, connect_streams_eager
from drawloom.kernels.hyper_connections.triton import connect_streams_triton
from support.kernels import DEVICE, assert_all_close, exact

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((1, 4, 5), (2, 3, 70), (37, 2, 64), (5, 1, 130), (3, 8, 33), (17, 4, 128))
"""Tokens, streams and channels."""


def draw(tokens: int, count: int, width: int, dtype: torch.dtype, constrained: bool) -> list[Tensor]:
    """Return streams, a branch's output, its weights, and the next branch's projection, static weights and scales."""
    by_stream = count + 2, count
    shape = (count * (count + 2), count * width) if constrained else (count + 2, width)
    drawn = torch.randn(tokens, count, width), torch.randn(tokens, width), torch.randn(tokens, *by_stream)
    parameters = torch.randn(shape) / shape[1] ** 0.5, torch.randn(by_stream), torch.randn(count + 2)
    dtypes = dtype, dtype, torch.float32, dtype, torch.float32, torch.float32
    tensors = zip((*drawn, *parameters), dtypes, strict=True)
    return [tensor.to(DEVICE, kind).requires_grad_() for tensor, kind in tensors]


def connect(function: Any, inputs: Any, writes: bool, reads: bool, constrained: bool) -> list[Tensor]:
    """Return the results with elements."""
    streams, output, before, *parameters = inputs
    connection = Connection(*parameters, 0.1, constrained) if reads else None
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


@pytest.mark.parametrize(("shape", "dtype"), [*zip(SHAPES, cycle(DTYPES))])
@pytest.mark.parametrize(
    ("writes", "reads", "constrained"),
    [*product([False, True], [True], [False, True]), (True, False, False)],
    ids=["reads", "reads, constrained", "both", "both, constrained", "writes"],
)
def test_triton_equals_eager(
    shape: tuple[int, int, int], dtype: torch.dtype, writes: bool, reads: bool, constrained: bool
) -> None:
    """At a layer's begin, inside of it and at its end, results and all gradients are as in float64."""
    compare(shape, dtype, writes, reads, constrained)
