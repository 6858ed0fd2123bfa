"""
Rotary position embedding in Triton: every element is read and written once, with any strides for rows, positions,
heads.

A program rotates a vector tile: consecutive heads at one or more positions in a row.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.operation import register_kernel, register_operator
from drawloom.kernels.triton.launch import cache_launches
from drawloom.kernels.triton.primitives import (
    cdiv,
    check_floats,
    contiguous_last_dim,
    next_power_of_2,
    unify_angle_strides,
)

TILE = 4096
"""Elements that a program rotates."""


def rope_triton(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, in_place: bool = False) -> Tensor:
    """
    Compute rope_eager for float32, bfloat16 and float16.

    x (rows, length, heads, head_dim), cos and sin (rows, length, rotary_dim // 2).
    """
    check_floats("rope_triton", x, cos, sin)
    rotated: Tensor = _Rope.apply(x, cos, sin, interleaved, False, in_place)  # type: ignore[no-untyped-call]
    return rotated


class _Rope(Function):
    """Rotation with only the angles saved; the backward pass is the same kernel with the negative sine."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, reverse: bool, in_place: bool
    ) -> Tensor:
        """Return a tensor like x (rows, length, heads, head_dim); cos and sin are (rows, length, rotary_dim // 2)."""
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.reverse = interleaved, reverse
        if not in_place:
            return _rotate(x, cos, sin, interleaved, reverse)
        ctx.mark_dirty(x)
        _rotate_in_place(x, cos, sin, interleaved, reverse)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        rotated = _Rope.apply(grad, cos, sin, ctx.interleaved, not ctx.reverse, False)  # type: ignore[no-untyped-call]
        return rotated, None, None, None, None, None


@register_kernel("rope", lambda x: x.new_empty(x.shape))
def _rotate(result: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, reverse: bool) -> None:
    _launch_rotation(contiguous_last_dim(x), cos, sin, result, interleaved, reverse)


@register_operator("rope_", lambda: None, mutates=["x"])
def _rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, reverse: bool) -> None:
    dense = contiguous_last_dim(x)
    _launch_rotation(dense, cos, sin, dense, interleaved, reverse)
    if dense is not x:
        x.copy_(dense)


def _launch_rotation(x: Tensor, cos: Tensor, sin: Tensor, result: Tensor, interleaved: bool, reverse: bool) -> None:
    """Write the rotated x to `result`, possibly x itself."""
    if not x.numel():
        return
    cos, sin = unify_angle_strides(cos, sin)
    rows, length, heads, channels = x.shape
    pairs = cos.shape[-1]
    block = next_power_of_2(max(pairs, 1))
    vectors = max(1, min(TILE // (2 * block), next_power_of_2(length * heads)))
    tiles = cdiv(length * heads, vectors)
    rest = 0 if result is x else channels - 2 * pairs
    _rope_kernel[(rows * tiles,)](
        x,
        cos,
        sin,
        result,
        length,
        tiles,
        *x.stride()[:3],
        *cos.stride()[:2],
        *result.stride()[:3],
        HEADS=heads,
        PAIRS=pairs,
        REST=rest,
        INTERLEAVED=interleaved,
        REVERSE=reverse,
        VECTORS=vectors,
        BLOCK=block,
        REST_BLOCK=next_power_of_2(max(rest, 1)),
        num_warps=max(1, min(vectors * block // 256, 8)),
        enable_fp_fusion=True,
    )


@triton.jit
def rotate_pairs(a, b, cos, sin, REVERSE: tl.constexpr):
    """Rotate both channels of pairs by angles, or by the negative angles."""
    if REVERSE:
        sin = -sin
    return a * cos - b * sin, b * cos + a * sin


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["length", "tiles"])
def _rope_kernel(
    x, cos, sin, result, length, tiles, x_row, x_position, x_head, angle_row, angle_position, result_row,
    result_position, result_head, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, REVERSE: tl.constexpr, VECTORS: tl.constexpr, BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    # fmt: on
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles).to(tl.int64) * VECTORS
    head = (first % HEADS).to(tl.int32) + tl.arange(0, VECTORS)[:, None]
    position = first // HEADS + head // HEADS
    head = (head % HEADS).to(tl.int64)
    inside = position < length
    pair = tl.arange(0, BLOCK)[None, :]
    is_pair = inside & (pair < PAIRS)
    x += row * x_row + position * x_position + head * x_head
    result += row * result_row + position * result_position + head * result_head
    cosines = tl.load(cos + row * angle_row + position * angle_position + pair, mask=is_pair, other=0.0).to(tl.float32)
    sines = tl.load(sin + row * angle_row + position * angle_position + pair, mask=is_pair, other=0.0).to(tl.float32)
    if INTERLEAVED:
        channel = tl.arange(0, 2 * BLOCK)[None, :]
        rotates = inside & (channel < 2 * PAIRS)
        values = tl.load(x + channel, mask=rotates, other=0.0).to(tl.float32)
        a, b = tl.split(values.reshape(VECTORS, BLOCK, 2))
        a, b = rotate_pairs(a, b, cosines, sines, REVERSE)
        values = tl.join(a, b).reshape(VECTORS, 2 * BLOCK).to(result.dtype.element_ty)
        tl.store(result + channel, values, mask=rotates)
    else:
        a = tl.load(x + pair, mask=is_pair, other=0.0).to(tl.float32)
        b = tl.load(x + PAIRS + pair, mask=is_pair, other=0.0).to(tl.float32)
        a, b = rotate_pairs(a, b, cosines, sines, REVERSE)
        tl.store(result + pair, a.to(result.dtype.element_ty), mask=is_pair)
        tl.store(result + PAIRS + pair, b.to(result.dtype.element_ty), mask=is_pair)
    if REST:
        channel = 2 * PAIRS + tl.arange(0, REST_BLOCK)[None, :]
        is_rest = inside & (channel < 2 * PAIRS + REST)
        tl.store(result + channel, tl.load(x + channel, mask=is_rest), mask=is_rest)
