"""
Token ids drawn in Triton: logits are read once, and a chosen tile again.

torch passes over the vocabulary a dozen times, in float32 and float64. Here a program sums a tile's weights; then a
program per row chooses a tile, and a word in it, by cumulative sums in float64. A row's draw does not depend on other
rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from drawloom.kernels.triton.primitives import cache_launches, cdiv, check_floats, contiguous_last_dim, next_power_of_2

TILE = 4096
"""Words in a tile: 16 per thread."""

LOWEST = constexpr(-1e30)
"""Finite logit in place of an infinite one, whose weight is 0."""


def draw_ids_triton(logits: Tensor, uniforms: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Compute draw_ids_eager for logits (rows, vocab_size) in float32, bfloat16 or float16."""
    check_floats("draw_ids_triton", logits)
    logits, (rows, words) = contiguous_last_dim(logits), logits.shape
    tiles = cdiv(words, TILE)
    # by tile: the largest logit, the summed weights, and the summed products with logits, both relative to it
    sums = torch.empty(3, rows, tiles, device=logits.device)
    result = torch.empty(rows, 3, dtype=torch.float64, device=logits.device)
    if not rows:
        return result
    _sum_tiles_kernel[(tiles, rows)](logits, temperature, sums, words, logits.stride(0), TILE=TILE, num_warps=8)
    _draw_kernel[(rows,)](
        logits,
        temperature,
        uniforms.contiguous(),
        sums,
        result,
        words,
        logits.stride(0),
        TILES=next_power_of_2(tiles),
        TILE=TILE,
        num_warps=8,
    )
    return result


@triton.jit
def _load_logits(logits, word, words, temperature):
    """Load a row's logits, divided by the temperature."""
    values = tl.load(logits + word, mask=word < words, other=-float("inf")).to(tl.float32)
    return values if temperature is None else values / tl.load(temperature)


# fmt: off
@cache_launches()
def _sum_tiles_kernel(logits, temperature, sums, words, stride, TILE: constexpr):
    # fmt: on
    row, tile = tl.program_id(1).to(tl.int64), tl.program_id(0)
    word = tile * TILE + tl.arange(0, TILE)
    values = _load_logits(logits + row * stride, word, words, temperature)
    largest = tl.max(values, 0)
    differences = values - tl.where(largest == -float("inf"), 0.0, largest)
    weights = tl.exp(differences)
    at = sums + row * tl.num_programs(0) + tile
    count = tl.num_programs(1).to(tl.int64) * tl.num_programs(0)
    tl.store(at, largest)
    tl.store(at + count, tl.sum(weights, 0))
    tl.store(at + 2 * count, tl.sum(weights * tl.maximum(differences, LOWEST), 0))


# fmt: off
@cache_launches()
def _draw_kernel(
    logits, temperature, uniforms, sums, result, words, stride, TILES: constexpr, TILE: constexpr,
):
    # fmt: on
    row, tiles = tl.program_id(0).to(tl.int64), tl.cdiv(words, TILE)
    part, count = tl.arange(0, TILES), tl.num_programs(0).to(tl.int64) * tiles
    at, is_part = sums + row * tiles + part, part < tiles
    tops = tl.load(at, mask=is_part, other=-float("inf"))
    totals = tl.load(at + count, mask=is_part, other=0.0)
    moments = tl.load(at + 2 * count, mask=is_part, other=0.0)
    largest = tl.max(tops, 0)
    factors = tl.exp(tops - largest)
    weights = (totals * factors).to(tl.float64)
    cumulative, total = tl.cumsum(weights, 0), tl.sum(weights, 0)
    threshold = tl.load(uniforms + row) * total
    # Rounding may leave a threshold above the last sum; then the last possible tile or word is drawn.
    chosen = tl.sum(((cumulative <= threshold) & is_part).to(tl.int32), 0)
    chosen = tl.minimum(chosen, tl.max(tl.where(weights > 0, part, 0), 0))
    before = tl.max(tl.where(part < chosen, cumulative, 0.0), 0)
    offset = tl.arange(0, TILE)
    word = chosen * TILE + offset
    values = _load_logits(logits + row * stride, word, words, temperature)
    weights_in_tile = tl.exp(values - largest).to(tl.float64)
    inner = before + tl.cumsum(weights_in_tile, 0)
    index = tl.sum(((inner <= threshold) & (word < words)).to(tl.int32), 0)
    index = tl.minimum(index, tl.max(tl.where(weights_in_tile > 0, offset, 0), 0))
    logit = tl.sum(tl.where(offset == index, values, 0.0), 0)
    log_total = tl.log(total.to(tl.float32))
    relative = factors * (moments + totals * tl.maximum(tops - largest, LOWEST))
    target = result + row * 3
    tl.store(target, (chosen * TILE + index).to(tl.float64))
    tl.store(target + 1, (logit - largest - log_total).to(tl.float64))
    tl.store(target + 2, (log_total - tl.sum(relative, 0) / total.to(tl.float32)).to(tl.float64))
