"""
Rotary position embedding in Triton: every element is read and written once, with any strides for rows, positions,
heads.

A program rotates a vector tile: consecutive heads at one or more positions in a row.

Kernels for qk_norm_rope: a program reads vector tiles and writes the same tiles.

RMSNorm and rotary position embedding for queries and keys in one launch: half the memory traffic, and one rounding.

The first programs process queries, the others keys. Every program sums its part of the weights' gradients, and the
programs' sums are added in a fixed order, so the result is deterministic.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from triton.language import constexpr

from drawloom.kernels.operation import make_differentiable, register_kernel
from drawloom.kernels.triton.primitives import (
    cache_launches,
    cdiv,
    check_floats,
    contiguous_last_dim,
    load_float32,
    load_or_zero,
    next_power_of_2,
    sm_count,
    sum_partials,
    unify_angle_strides,
)

TILE = 4096
"""Elements that a program rotates."""


def rope_triton(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """
    Compute rope_eager for float32, bfloat16 and float16.

    x (rows, length, heads, head_dim), cos and sin (rows, length, rotary_dim // 2).
    """
    check_floats("rope_triton", x, cos, sin)
    rotated: Tensor = _Rope.apply(x, cos, sin, interleaved, False)  # type: ignore[no-untyped-call]
    return rotated


class _Rope(Function):
    """Rotation with only the angles saved; the backward pass is the same kernel with the negative sine."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, reverse: bool) -> Tensor:
        """Return a tensor like x (rows, length, heads, head_dim); cos and sin are (rows, length, rotary_dim // 2)."""
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.reverse = interleaved, reverse
        return _rotate(x, cos, sin, interleaved, reverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        rotated = _Rope.apply(grad, cos, sin, ctx.interleaved, not ctx.reverse)  # type: ignore[no-untyped-call]
        return rotated, None, None, None, None


@register_kernel("rope", lambda x: x.new_empty(x.shape))
def _rotate(result: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, reverse: bool) -> None:
    if not x.numel():
        return
    x = contiguous_last_dim(x)
    cos, sin = unify_angle_strides(cos, sin)
    rows, length, heads, channels = x.shape
    pairs = cos.shape[-1]
    block = next_power_of_2(max(pairs, 1))
    vectors = max(1, min(TILE // (2 * block), next_power_of_2(length * heads)))
    tiles = cdiv(length * heads, vectors)
    rest = channels - 2 * pairs
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
    )


@triton.jit
def rotate_pairs(a, b, cos, sin, REVERSE: constexpr):
    """Rotate both channels of pairs by angles, or by the negative angles."""
    if REVERSE:
        sin = -sin
    return a * cos - b * sin, b * cos + a * sin


# fmt: off
@cache_launches("length", "tiles")
def _rope_kernel(
    x, cos, sin, result, length, tiles, x_row, x_position, x_head, angle_row, angle_position, result_row,
    result_position, result_head, HEADS: constexpr, PAIRS: constexpr, REST: constexpr,
    INTERLEAVED: constexpr, REVERSE: constexpr, VECTORS: constexpr, BLOCK: constexpr,
    REST_BLOCK: constexpr,
):
    # fmt: on
    row, position, head, inside = _locate_tile_vectors(tl.program_id(0), tiles, length, HEADS, VECTORS)
    pair = tl.arange(0, BLOCK)[None, :]
    is_pair = inside & (pair < PAIRS)
    x += row * x_row + position * x_position + head * x_head
    result += row * result_row + position * result_position + head * result_head
    cosines = load_float32(cos + row * angle_row + position * angle_position + pair, is_pair)
    sines = load_float32(sin + row * angle_row + position * angle_position + pair, is_pair)
    if INTERLEAVED:
        channel = tl.arange(0, 2 * BLOCK)[None, :]
        rotates = inside & (channel < 2 * PAIRS)
        values = load_float32(x + channel, rotates)
        a, b = tl.split(values.reshape(VECTORS, BLOCK, 2))
        a, b = rotate_pairs(a, b, cosines, sines, REVERSE)
        values = tl.join(a, b).reshape(VECTORS, 2 * BLOCK).to(result.dtype.element_ty)
        tl.store(result + channel, values, mask=rotates)
    else:
        a, b = _load_first_and_second_half(x, is_pair, pair, PAIRS)
        a, b = rotate_pairs(a, b, cosines, sines, REVERSE)
        _store_first_and_second_half(result, a, b, is_pair, pair, PAIRS)
    if REST:
        channel = 2 * PAIRS + tl.arange(0, REST_BLOCK)[None, :]
        is_rest = inside & (channel < 2 * PAIRS + REST)
        tl.store(result + channel, tl.load(x + channel, mask=is_rest), mask=is_rest)


# fmt: off


@triton.jit
def _locate_tile_vectors(tile, tiles, length, HEADS: constexpr, VECTORS: constexpr):
    """Return a tile's row, its vectors' positions and heads, and a mask for existing vectors."""
    row = (tile // tiles).to(tl.int64)
    first = (tile % tiles).to(tl.int64) * VECTORS
    head = (first % HEADS).to(tl.int32) + tl.arange(0, VECTORS)[:, None]
    position = first // HEADS + head // HEADS
    return row, position, (head % HEADS).to(tl.int64), position < length


@triton.jit
def _load_first_and_second_half(at, mask, pair, PAIRS: constexpr):
    """Return both channels by pair, in float32."""
    a = load_float32(at + pair, mask)
    return a, load_float32(at + PAIRS + pair, mask)


@triton.jit
def _store_first_and_second_half(at, a, b, mask, pair, PAIRS: constexpr):
    tl.store(at + pair, a, mask=mask)
    tl.store(at + PAIRS + pair, b, mask=mask)


@triton.jit
def _norm_and_rotate(
    x, weight, cos, sin, result, rstd, tile, tiles, length, eps, x_row, x_position, x_head, angle_row,
    angle_position, HEADS: constexpr, PAIRS: constexpr, VECTORS: constexpr, BLOCK: constexpr,
):
    row, position, head, inside = _locate_tile_vectors(tile, tiles, length, HEADS, VECTORS)
    pair = tl.arange(0, BLOCK)[None, :]
    within = pair < PAIRS
    mask = inside & within
    a, b = _load_first_and_second_half(x + row * x_row + position * x_position + head * x_head, mask, pair, PAIRS)
    scale = tl.rsqrt(tl.sum(a * a + b * b, 1, keep_dims=True) / (2 * PAIRS) + eps)
    vector = (row * length + position) * HEADS + head
    tl.store(rstd + vector, scale, mask=inside)
    weight_a, weight_b = _load_first_and_second_half(weight, within, pair, PAIRS)
    cosines = load_float32(cos + row * angle_row + position * angle_position + pair, mask)
    sines = load_float32(sin + row * angle_row + position * angle_position + pair, mask)
    a, b = rotate_pairs(a * scale * weight_a, b * scale * weight_b, cosines, sines, False)
    _store_first_and_second_half(result + vector * (2 * PAIRS), a, b, mask, pair, PAIRS)


@cache_launches("q_programs", "q_tiles", "k_tiles", "length")
def forward_kernel(
    q, k, q_weight, k_weight, cos, sin, q_result, k_result, q_rstd, k_rstd, q_programs, q_tiles, k_tiles,
    length, eps, q_row, q_position, q_head, k_row, k_position, k_head, angle_row, angle_position,
    Q_HEADS: constexpr, K_HEADS: constexpr, PAIRS: constexpr, VECTORS: constexpr, BLOCK: constexpr,
):
    program = tl.program_id(0)
    if program < q_programs:
        _norm_and_rotate(
            q, q_weight, cos, sin, q_result, q_rstd, program, q_tiles, length, eps,
            q_row, q_position, q_head, angle_row, angle_position,
            Q_HEADS, PAIRS, VECTORS, BLOCK,
        )
    else:
        _norm_and_rotate(
            k, k_weight, cos, sin, k_result, k_rstd, program - q_programs, k_tiles, length, eps,
            k_row, k_position, k_head, angle_row, angle_position,
            K_HEADS, PAIRS, VECTORS, BLOCK,
        )


@triton.jit
def _norm_and_rotate_backward(
    grad, x, weight, rstd, cos, sin, result, parts, program, programs, count, tiles, length, grad_row,
    grad_position, grad_head, x_row, x_position, x_head, angle_row, angle_position, HEADS: constexpr,
    PAIRS: constexpr, VECTORS: constexpr, BLOCK: constexpr,
):
    """Compute the gradients for this program's tiles, and its partial sum for the weight's gradient."""
    pair = tl.arange(0, BLOCK)[None, :]
    within = pair < PAIRS
    weight_a, weight_b = _load_first_and_second_half(weight, within, pair, PAIRS)
    total_a, total_b = tl.zeros((VECTORS, BLOCK), tl.float32), tl.zeros((VECTORS, BLOCK), tl.float32)
    for tile in tl.range(program, count, programs, num_stages=3):
        row, position, head, inside = _locate_tile_vectors(tile, tiles, length, HEADS, VECTORS)
        mask = inside & within
        vector = (row * length + position) * HEADS + head
        a, b = _load_first_and_second_half(x + row * x_row + position * x_position + head * x_head, mask, pair, PAIRS)
        grad_at = grad + row * grad_row + position * grad_position + head * grad_head
        grad_a, grad_b = _load_first_and_second_half(grad_at, mask, pair, PAIRS)
        cosines = load_float32(cos + row * angle_row + position * angle_position + pair, mask)
        sines = load_float32(sin + row * angle_row + position * angle_position + pair, mask)
        scale = load_or_zero(rstd + vector, inside)
        grad_a, grad_b = rotate_pairs(grad_a, grad_b, cosines, sines, True)
        a *= scale
        b *= scale
        total_a += grad_a * a
        total_b += grad_b * b
        grad_a *= weight_a
        grad_b *= weight_b
        along = tl.sum(grad_a * a + grad_b * b, 1, keep_dims=True) / (2 * PAIRS)
        grad_a, grad_b = (grad_a - a * along) * scale, (grad_b - b * along) * scale
        _store_first_and_second_half(result + vector * (2 * PAIRS), grad_a, grad_b, mask, pair, PAIRS)
    pair = tl.arange(0, BLOCK)
    _store_first_and_second_half(parts, tl.sum(total_a, 0), tl.sum(total_b, 0), pair < PAIRS, pair, PAIRS)


@cache_launches("q_programs", "q_count", "k_count", "q_tiles", "k_tiles", "length")
def backward_kernel(
    q_grad, k_grad, q, k, q_weight, k_weight, q_rstd, k_rstd, cos, sin, q_result, k_result, parts, q_programs,
    q_count, k_count, q_tiles, k_tiles, length, q_grad_row, q_grad_position, q_grad_head, k_grad_row, k_grad_position,
    k_grad_head, q_row, q_position, q_head, k_row, k_position, k_head, angle_row, angle_position,
    Q_HEADS: constexpr, K_HEADS: constexpr, PAIRS: constexpr, VECTORS: constexpr, BLOCK: constexpr,
):
    program = tl.program_id(0)
    parts += program * 2 * PAIRS
    if program < q_programs:
        _norm_and_rotate_backward(
            q_grad, q, q_weight, q_rstd, cos, sin, q_result, parts,
            program, q_programs, q_count, q_tiles, length,
            q_grad_row, q_grad_position, q_grad_head, q_row, q_position, q_head,
            angle_row, angle_position,
            Q_HEADS, PAIRS, VECTORS, BLOCK,
        )
    else:
        _norm_and_rotate_backward(
            k_grad, k, k_weight, k_rstd, cos, sin, k_result, parts,
            program - q_programs, tl.num_programs(0) - q_programs, k_count, k_tiles, length,
            k_grad_row, k_grad_position, k_grad_head, k_row, k_position, k_head,
            angle_row, angle_position,
            K_HEADS, PAIRS, VECTORS, BLOCK,
        )


QK_TILE = 4096
"""Elements of a program's tile in the forward pass; twice as many as in the backward pass, which has more values."""

PROGRAMS = 2
"""Programs of the backward pass per multiprocessor, as for rms_norm."""


def qk_norm_rope_triton(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """
    Compute qk_norm_rope_eager for float32, bfloat16 and float16, without rounding between norm and rotation.

    q (rows, length, heads, head_dim), k (rows, length, kv_heads, head_dim), weights (head_dim,), cos and sin
    (rows, length, head_dim // 2).
    """
    check_floats("qk_norm_rope_triton", q, k, q_weight, k_weight, cos, sin)
    return _differentiable_qk_norm_rope(q, k, q_weight, k_weight, eps, cos, sin)  # type: ignore[return-value]


def _allocate_rotated(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return empty tensors for rotated queries and keys, and for 1 / rms by vector."""
    q_rstd, k_rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for x in (q, k))
    return q.new_empty(q.shape), k.new_empty(k.shape), q_rstd, k_rstd


@register_kernel("qk_norm_rope", _allocate_rotated)
def _qk_norm_rope(
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> None:
    if not q.numel():
        return
    q, k, (cos, sin) = contiguous_last_dim(q), contiguous_last_dim(k), unify_angle_strides(cos, sin)
    rows, length, _, channels = q.shape
    block = next_power_of_2(channels // 2)
    vectors = max(1, QK_TILE // (2 * block))
    q_tiles, k_tiles = (cdiv(length * x.shape[2], vectors) for x in (q, k))
    forward_kernel[(rows * (q_tiles + k_tiles),)](
        q,
        k,
        q_weight.contiguous(),
        k_weight.contiguous(),
        cos,
        sin,
        *results,
        rows * q_tiles,
        q_tiles,
        k_tiles,
        length,
        eps,
        *q.stride()[:3],
        *k.stride()[:3],
        *cos.stride()[:2],
        Q_HEADS=q.shape[2],
        K_HEADS=k.shape[2],
        PAIRS=channels // 2,
        VECTORS=vectors,
        BLOCK=block,
        num_warps=8,
    )


@register_kernel(
    "qk_norm_rope_backward",
    lambda q, k, q_weight, k_weight: tuple(x.new_empty(x.shape) for x in (q, k, q_weight, k_weight)),
)
def _qk_norm_rope_backward(
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    q_grad: Tensor,
    k_grad: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
) -> None:
    q_result, k_result, grad_q_weight, grad_k_weight = results
    if not q.numel():
        grad_q_weight.zero_()
        grad_k_weight.zero_()
        return
    q_grad, k_grad, q, k = (contiguous_last_dim(x) for x in (q_grad, k_grad, q, k))
    cos, sin = unify_angle_strides(cos, sin)
    rows, length, _, channels = q.shape
    block = next_power_of_2(channels // 2)
    vectors = max(1, QK_TILE // (4 * block))
    q_tiles, k_tiles = (cdiv(length * x.shape[2], vectors) for x in (q, k))
    q_programs, k_programs = _divide_programs(rows * q_tiles, rows * k_tiles, PROGRAMS * sm_count(q.device))
    parts = q.new_empty(q_programs + k_programs, channels, dtype=torch.float32)
    backward_kernel[(q_programs + k_programs,)](
        q_grad,
        k_grad,
        q,
        k,
        q_weight.contiguous(),
        k_weight.contiguous(),
        q_rstd,
        k_rstd,
        cos,
        sin,
        q_result,
        k_result,
        parts,
        q_programs,
        rows * q_tiles,
        rows * k_tiles,
        q_tiles,
        k_tiles,
        length,
        *q_grad.stride()[:3],
        *k_grad.stride()[:3],
        *q.stride()[:3],
        *k.stride()[:3],
        *cos.stride()[:2],
        Q_HEADS=q.shape[2],
        K_HEADS=k.shape[2],
        PAIRS=channels // 2,
        VECTORS=vectors,
        BLOCK=block,
    )
    sum_partials(parts[:q_programs], grad_q_weight)
    sum_partials(parts[q_programs:], grad_k_weight)


_differentiable_qk_norm_rope = make_differentiable(_qk_norm_rope, _qk_norm_rope_backward, results=2)
"""Norm and rotation, with saved queries, keys and one float32 per vector."""


def _divide_programs(q_tiles: int, k_tiles: int, programs: int) -> tuple[int, int]:
    """Return the program counts for queries and for keys, in proportion to their tiles."""
    k_programs = max(1, programs * k_tiles // (q_tiles + k_tiles))
    return min(q_tiles, max(1, programs - k_programs)), min(k_tiles, k_programs)
