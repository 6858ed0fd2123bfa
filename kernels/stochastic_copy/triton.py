"""Stochastic rounding from float32 to bfloat16 in Triton, with one random draw for eight elements."""

import torch
import triton.language as tl
from torch import Tensor

from drawloom.kernels.operation import register_operator
from drawloom.kernels.stochastic_copy.eager import PER_DRAW
from drawloom.kernels.triton.primitives import (
    cache_launches,
    cdiv,
    load_or_zero,
    philox,
    round_stochastically,
    split_into_16bit_halves,
)

BLOCK = 1024


def stochastic_copy_triton(target: Tensor, source: Tensor, key: int, counter: int, first: int = 0) -> None:
    """Compute stochastic_copy_eager, bitwise equal: float32 source into bfloat16 target, both (...) with one shape."""
    if first % PER_DRAW:
        raise ValueError(f"first = {first} is not a multiple of {PER_DRAW}")
    if source.dtype != torch.float32 or target.dtype != torch.bfloat16 or source.shape != target.shape:
        raise ValueError(
            f"stochastic_copy_triton copies float32 to bfloat16 of one shape, not {source.dtype} {tuple(source.shape)} "
            f"to {target.dtype} {tuple(target.shape)}"
        )
    _copy(target, source, key, counter, first)


@register_operator("stochastic_copy", lambda: None, mutates=["target"])
def _copy(target: Tensor, source: Tensor, key: int, counter: int, first: int) -> None:
    if not source.numel():
        return
    dense = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
    count = source.numel()
    _stochastic_copy_kernel[(cdiv(count, BLOCK),)](
        dense, source.contiguous(), key, counter, first, count, BLOCK=BLOCK, PER_DRAW=PER_DRAW
    )
    if dense is not target:
        target.copy_(dense)


@cache_launches("key", "counter", "first")
def _stochastic_copy_kernel(target, source, key, counter, first, count, BLOCK: tl.constexpr, PER_DRAW: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    draw = (first + start) // PER_DRAW + tl.arange(0, BLOCK // PER_DRAW)
    a, b, c, d = philox(key, draw, counter)
    # Of eight elements, the first two use word a, the next two word b, and so on; each word has two halves.
    noise = tl.join(tl.join(a, c), tl.join(b, d)).reshape(BLOCK // 2)
    element = start + tl.arange(0, BLOCK)
    values = load_or_zero(source + element, element < count)
    tl.store(target + element, round_stochastically(values, split_into_16bit_halves(noise)), mask=element < count)
