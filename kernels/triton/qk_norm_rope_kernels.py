"""Kernels for qk_norm_rope: a program reads vector tiles and writes the same tiles."""

import triton
import triton.language as tl

from drawloom.kernels.triton.launch import cache_launches
from drawloom.kernels.triton.rope import rotate_pairs

# fmt: off


@triton.jit
def _locate_tile_vectors(tile, tiles, length, HEADS: tl.constexpr, VECTORS: tl.constexpr):
    """Return a tile's row, its vectors' positions and heads, and a mask for existing vectors."""
    row = (tile // tiles).to(tl.int64)
    first = (tile % tiles).to(tl.int64) * VECTORS
    head = (first % HEADS).to(tl.int32) + tl.arange(0, VECTORS)[:, None]
    position = first // HEADS + head // HEADS
    return row, position, (head % HEADS).to(tl.int64), position < length


@triton.jit
def _load_first_and_second_half(at, mask, pair, PAIRS: tl.constexpr):
    """Return both channels by pair, in float32."""
    a = tl.load(at + pair, mask=mask, other=0.0).to(tl.float32)
    return a, tl.load(at + PAIRS + pair, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_first_and_second_half(at, a, b, mask, pair, PAIRS: tl.constexpr):
    tl.store(at + pair, a.to(at.dtype.element_ty), mask=mask)
    tl.store(at + PAIRS + pair, b.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _norm_and_rotate(
    x, weight, cos, sin, result, rstd, tile, tiles, length, eps, x_row, x_position, x_head, angle_row,
    angle_position, HEADS: tl.constexpr, PAIRS: tl.constexpr, VECTORS: tl.constexpr, BLOCK: tl.constexpr,
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
    cosines = tl.load(cos + row * angle_row + position * angle_position + pair, mask=mask, other=0.0).to(tl.float32)
    sines = tl.load(sin + row * angle_row + position * angle_position + pair, mask=mask, other=0.0).to(tl.float32)
    a, b = rotate_pairs(a * scale * weight_a, b * scale * weight_b, cosines, sines, False)
    _store_first_and_second_half(result + vector * (2 * PAIRS), a, b, mask, pair, PAIRS)


@cache_launches
@triton.jit(do_not_specialize=["q_programs", "q_tiles", "k_tiles", "length"])
def forward_kernel(
    q, k, q_weight, k_weight, cos, sin, q_result, k_result, q_rstd, k_rstd, q_programs, q_tiles, k_tiles,
    length, eps, q_row, q_position, q_head, k_row, k_position, k_head, angle_row, angle_position,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, PAIRS: tl.constexpr, VECTORS: tl.constexpr, BLOCK: tl.constexpr,
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
    grad_position, grad_head, x_row, x_position, x_head, angle_row, angle_position, HEADS: tl.constexpr,
    PAIRS: tl.constexpr, VECTORS: tl.constexpr, BLOCK: tl.constexpr,
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
        cosines = tl.load(cos + row * angle_row + position * angle_position + pair, mask=mask, other=0.0).to(tl.float32)
        sines = tl.load(sin + row * angle_row + position * angle_position + pair, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(rstd + vector, mask=inside, other=0.0)
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


@cache_launches
@triton.jit(do_not_specialize=["q_programs", "q_count", "k_count", "q_tiles", "k_tiles", "length"])
def backward_kernel(
    q_grad, k_grad, q, k, q_weight, k_weight, q_rstd, k_rstd, cos, sin, q_result, k_result, parts, q_programs,
    q_count, k_count, q_tiles, k_tiles, length, q_grad_row, q_grad_position, q_grad_head, k_grad_row, k_grad_position,
    k_grad_head, q_row, q_position, q_head, k_row, k_position, k_head, angle_row, angle_position,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, PAIRS: tl.constexpr, VECTORS: tl.constexpr, BLOCK: tl.constexpr,
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
