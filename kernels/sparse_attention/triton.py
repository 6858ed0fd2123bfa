"""
Attention to chosen keys, and choices of keys, in Triton; see `eager.py` for the operations.

A token's heads share the chosen keys, so its scores and sums are matrix products, whose kernels read keys from their
places. Weights are relative to a tile's best score until all scores are known. Passes go over tokens in chunks, which
limits their memory. The backward pass computes scores again.

A key's gradient sums over the tokens that chose it. Their parts are stored in 16 bits, one row per token and chosen
key, and added up in float32, token by token. Atomic additions would take as long, and change bits from run to
run.

An indexer's scores are in memory for one chunk and all keys; torch selects the best.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from triton.language import constexpr

from drawloom.kernels.attention.eager import attention_flops
from drawloom.kernels.operation import once_differentiable, register_kernel
from drawloom.kernels.sparse_attention.eager import choose_keys_eager
from drawloom.kernels.triton.primitives import (
    cache_launches,
    cdiv,
    check_floats,
    has_large_shared_memory,
    load_float32,
    load_or_zero,
    mask_tile,
    next_power_of_2,
)

CHUNK_BYTES, SCORE_BYTES = 2**31, 2**28
"""Most bytes for a chunk's products and parts of keys' gradients, and for scores with all keys."""

MIN_BLOCK = 64
"""A tile's smallest side in a product; `triton/chunks.py` has the reason."""

MAX_KEY_BYTES = 512
"""Most bytes of an indexer's key, for which shared memory is enough."""

TILE, STEP_BYTES = 128, 128
"""Chosen keys in a tile, and bytes by row in a product's step."""

TILES = {
    "scores": {"BLOCK": 64, "KEYS": 128, "num_warps": 4, "num_stages": 3},
    "pairs": {"num_warps": 4, "num_stages": 3},
    "mixed": {"COLUMNS": 128, "num_warps": 4, "num_stages": 3},
    "sums": {"ENTRIES": 8},
}
"""Launch options for an H200: an indexer's scores, heads' pairs with keys, mixed keys, and sums by key."""


class Choice(NamedTuple):
    """
    Tokens' chosen keys, in two dimensions.

    Places, int32 (tokens, chosen), are the keys' indices among all rows' keys, then -1 from a token's count on; counts
    are int32 (tokens,).
    """

    places: Tensor
    counts: Tensor

    def split(self, pair_bytes: int) -> Iterator[tuple[slice, "Choice"]]:
        """Yield chunks, with their slices; a token takes `pair_bytes` for each chosen key."""
        tokens, chosen = self.places.shape
        size = max(1, CHUNK_BYTES // (chosen * pair_bytes))
        for first in range(0, tokens, size):
            chunk = slice(first, min(first + size, tokens))
            yield chunk, Choice(self.places[chunk], self.counts[chunk])


def _locate_keys(choice: Tensor, keys: Tensor) -> Choice:
    """Return a choice (rows, length, chosen) among keys (rows, keys, width)."""
    offsets = torch.arange(len(choice), dtype=torch.int32, device=choice.device) * keys.shape[1]
    places = torch.where(choice < 0, -1, choice + offsets[:, None, None]).flatten(0, 1)
    return Choice(places, (places >= 0).sum(1, dtype=torch.int32))


def choose_keys_triton(
    queries: Tensor, keys: Tensor, factors: Tensor, first_key: Tensor, visible_counts: Tensor, chosen: int
) -> tuple[Tensor, Tensor]:
    """
    Compute choose_keys_eager for float32, bfloat16 and float16, in another order; for wide keys, by itself.

    queries (rows, length, heads, width), keys (rows, keys, width), factors (rows, length, heads), first_key and
    visible_counts int32 (rows, length); results int32 and float32 (rows, length, chosen).
    """
    check_floats("choose_keys_triton", queries, keys, factors)
    has_memory = not keys.is_cuda or has_large_shared_memory(keys.device)
    if not has_memory or keys.shape[2] * keys.itemsize > MAX_KEY_BYTES:
        return choose_keys_eager(queries, keys, factors, first_key, visible_counts, chosen)
    return _Choice.apply(queries, keys, factors, first_key, visible_counts, chosen)  # type: ignore[no-untyped-call, no-any-return]


class _Choice(Function):
    """Chosen keys and their scores, which have gradients."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, factors: Tensor, first_key: Tensor, visible_counts: Tensor, chosen: int
    ) -> tuple[Tensor, Tensor]:
        """Return indices and scores, both (rows, length, chosen)."""
        choice, scores = _choose_keys(queries, keys, factors, first_key, visible_counts, chosen)
        ctx.save_for_backward(queries, keys, factors, choice)
        ctx.mark_non_differentiable(choice)
        return choice, scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_choose_keys_backward(grad, *ctx.saved_tensors), *(None,) * 3


@register_kernel(
    "choose_keys",
    lambda queries, chosen: tuple(
        queries.new_empty(*queries.shape[:2], chosen, dtype=dtype) for dtype in (torch.int32, torch.float32)
    ),
    flops=lambda queries, keys: float(queries.numel() * keys.shape[1]),  # earlier keys are half of all
    scratch=lambda queries, keys, chosen: min(SCORE_BYTES, 4 * queries.shape[:2].numel() * max(keys.shape[1], chosen)),
)
def _choose_keys(
    results: tuple[Tensor, Tensor],
    queries: Tensor,
    keys: Tensor,
    factors: Tensor,
    first_key: Tensor,
    visible_counts: Tensor,
    chosen: int,
) -> None:
    (rows, length, heads, width), total = queries.shape, keys.shape[1]
    tile, choice_index = TILES["scores"], torch.arange(chosen, dtype=torch.int32, device=keys.device)
    ends, chunk_tokens = first_key + visible_counts, max(1, SCORE_BYTES // (4 * max(total, chosen)))
    for row, begin in product(range(rows), range(0, length, chunk_tokens)):
        tokens = slice(begin, min(begin + chunk_tokens, length))
        # Causal: no token in this chunk sees a key from `limit` on.
        limit = min(total, tokens.stop + total - length)
        scores = keys.new_empty(tokens.stop - begin, max(limit, chosen), dtype=torch.float32)
        _score_visible_keys[tuple(map(cdiv, scores.shape, (tile["BLOCK"], tile["KEYS"])))](
            *(x[row, tokens].contiguous() for x in (queries, factors, first_key, ends)),
            *(keys[row].contiguous(), scores, *scores.shape, limit),
            HEADS=heads,
            WIDTH=width,
            WIDTH_BLOCK=max(MIN_BLOCK, next_power_of_2(width)),
            **tile,
        )
        begins, seen = first_key[row, tokens, None], visible_counts[row, tokens, None]
        best = scores.topk(chosen, sorted=False).indices
        # A token that sees at most `chosen` keys chooses all of them.
        best = torch.where(seen > chosen, best, torch.where(choice_index < seen, begins + choice_index, -1))
        results[0][row, tokens] = best
        results[1][row, tokens] = scores.gather(1, best.clamp(min=0)).masked_fill(best < 0, -torch.inf)


@register_kernel(
    "choose_keys_backward",
    lambda queries, keys, factors: tuple(x.new_empty(x.shape) for x in (queries, keys, factors)),
    flops=lambda queries, choice: 6.0 * queries.shape[2:].numel() * choice.numel(),
    scratch=lambda queries, keys, choice: _count_scratch(choice, keys, sum(queries.shape[2:])),
)
def _choose_keys_backward(
    grads: tuple[Tensor, Tensor, Tensor], grad: Tensor, queries: Tensor, keys: Tensor, factors: Tensor, choice: Tensor
) -> None:
    grad, queries, factors = (x.contiguous().flatten(0, 1) for x in (grad, queries, factors))
    heads, width = queries.shape[1:]
    keys, grad_keys = keys.contiguous(), keys.new_zeros(keys.shape, dtype=torch.float32)
    for tokens, chunk in _locate_keys(choice, keys).split((heads + width) * keys.itemsize):
        pairs, own = keys.new_empty(len(chunk.places), heads, choice.shape[2]), queries[tokens]
        grid, options = _tile_pairs(pairs, keys)
        by_tile = keys.new_empty(len(own), grid[0] // len(own), heads, dtype=torch.float32)
        _differentiate_products[grid](own, keys, *chunk, grad[tokens], factors[tokens], pairs, by_tile, **options)
        grads[2].flatten(0, 1)[tokens] = by_tile.sum(1)
        _mix_keys(grads[0].flatten(0, 1)[tokens], pairs, None, keys, chunk)
        _add_by_key(chunk, pairs, own, grad_keys)
    grads[1].copy_(grad_keys)


def _count_scratch(choice: Tensor, keys: Tensor, width: int) -> int:
    """Return a chunk's bytes, with `width` numbers for a token and a chosen key."""
    return min(CHUNK_BYTES, choice.numel() * width * keys.itemsize)


def sparse_attention_triton(
    q: Tensor, latents: Tensor, choice: Tensor, value_width: int, scale: float
) -> tuple[Tensor, Tensor]:
    """
    Compute sparse_attention_eager for float32, bfloat16 and float16.

    q (rows, length, heads, width), latents (rows, keys, width), choice int32 (rows, length, chosen); results
    (rows, length, heads, value_width), and float32 (rows, length, chosen).
    """
    check_floats("sparse_attention_triton", q, latents)
    return _Attention.apply(q, latents, choice, value_width, scale)  # type: ignore[no-untyped-call, no-any-return]


class _Attention(Function):
    """Attention, and the weights' sums over heads, which have no gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, latents: Tensor, choice: Tensor, value_width: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return results (rows, length, heads, value_width), and sums (rows, length, chosen)."""
        mixed, sums, logs = _attend(q, latents, choice, value_width, scale)
        ctx.save_for_backward(mixed, logs, q, latents, choice)
        ctx.scale = scale
        ctx.mark_non_differentiable(sums)
        return mixed, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = _attend_backward(grad, *ctx.saved_tensors, ctx.scale)  # type: ignore[call-arg]
        return *grads, *(None,) * 3


@register_kernel(
    "sparse_attention",
    lambda q, choice, value_width: (
        q.new_empty(*q.shape[:3], value_width),
        q.new_empty(choice.shape, dtype=torch.float32),
        q.new_empty(q.shape[:3], dtype=torch.float32),
    ),
    flops=lambda q, choice, value_width: attention_flops(choice.numel() * q.shape[2], q.shape[3], value_width),
    scratch=lambda q, latents, choice: _count_scratch(choice, latents, q.shape[2]),
)
def _attend(
    results: tuple[Tensor, Tensor, Tensor], q: Tensor, latents: Tensor, choice: Tensor, value_width: int, scale: float
) -> None:
    mixed, sums, logs = (x.flatten(0, 1) for x in results)
    q, latents, heads = q.flatten(0, 1), latents.contiguous(), q.shape[2]
    for tokens, chunk in _locate_keys(choice, latents).split(heads * q.itemsize):
        pairs = q.new_empty(len(chunk.places), heads, choice.shape[2])
        grid, options = _tile_pairs(pairs, latents)
        tops, by_tile = q.new_empty(2, len(pairs), grid[0] // len(pairs), heads, dtype=torch.float32)
        _weigh_keys[grid](q[tokens].contiguous(), latents, *chunk, pairs, tops, by_tile, scale, **options)
        torch.logsumexp(by_tile, 1, out=logs[tokens])
        factors = (tops - logs[tokens, None]).exp_()
        _mix_keys(mixed[tokens], pairs, factors, latents, chunk)
        _sum_heads[grid](pairs, factors, sums[tokens], **options)


@register_kernel(
    "sparse_attention_backward",
    lambda q, latents: (q.new_empty(q.shape), latents.new_empty(latents.shape)),
    flops=lambda grad, q, choice: attention_flops(
        choice.numel() * q.shape[2], q.shape[3], grad.shape[3], backward=True
    ),
    scratch=lambda q, latents, choice: _count_scratch(choice, latents, 2 * q.shape[2] + q.shape[3]),
)
def _attend_backward(
    grads: tuple[Tensor, Tensor],
    grad: Tensor,
    mixed: Tensor,
    logs: Tensor,
    q: Tensor,
    latents: Tensor,
    choice: Tensor,
    scale: float,
) -> None:
    grad, mixed, logs, q = (x.flatten(0, 1) for x in (grad, mixed, logs, q))
    heads, width = q.shape[1:]
    latents, grad_latents = latents.contiguous(), latents.new_zeros(latents.shape, dtype=torch.float32)
    for tokens, chunk in _locate_keys(choice, latents).split((2 * heads + width) * q.itemsize):
        # Products with keys are scores and weights' gradients; a key's gradient is the sum of these rows times pairs.
        rows = q.new_empty(len(chunk.places), 2 * heads, width)
        means = q.new_empty(rows.shape[0], heads, dtype=torch.float32)
        _join_rows[(means.numel(),)](
            *(x[tokens].contiguous() for x in (q, grad, mixed)),
            *(rows, means),
            HEADS=heads,
            WIDTH=width,
            VALUES=grad.shape[2],
            BLOCK=next_power_of_2(width),
        )
        pairs = q.new_empty(len(rows), 2 * heads, choice.shape[2])
        grid, options = _tile_pairs(pairs, latents)
        _differentiate_scores[grid](
            rows, latents, *chunk, logs[tokens], means, pairs, scale, **options | {"HEADS": heads, "BLOCK": MIN_BLOCK}
        )
        _mix_keys(grads[0].flatten(0, 1)[tokens], pairs, None, latents, chunk)
        _add_by_key(chunk, pairs, rows, grad_latents)
    grads[1].copy_(grad_latents)


def _tile_pairs(pairs: Tensor, keys: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """Return the launch grid and options for pairs (tokens, heads, chosen), a program per token and tile."""
    tokens, heads, chosen = pairs.shape
    sizes = {"HEADS": heads, "CHOSEN": chosen, "WIDTH": keys.shape[2], "STEP": STEP_BYTES // keys.itemsize}
    block = max(MIN_BLOCK, min(TILE, next_power_of_2(heads)))
    return (tokens * cdiv(chosen, TILE),), sizes | {"BLOCK": block, "TILE": TILE} | TILES["pairs"]


def _mix_keys(result: Tensor, pairs: Tensor, factors: Tensor | None, keys: Tensor, choice: Choice) -> None:
    """
    Store sums of chosen keys' first channels, (tokens, heads, channels), weighted by pairs (tokens, rows, chosen).

    The first rows count, times factors (tokens, tiles of keys, heads) if there are any.
    """
    (tokens, heads, channels), tile = result.shape, TILES["mixed"]
    block = max(MIN_BLOCK, min(TILE, next_power_of_2(heads)))
    _mix_kernel[(tokens * cdiv(heads, block) * cdiv(channels, tile["COLUMNS"]),)](
        *(pairs, factors, keys, *choice, result),
        HEADS=heads,
        ROWS=pairs.shape[1],
        CHOSEN=pairs.shape[2],
        WIDTH=keys.shape[2],
        CHANNELS=channels,
        BLOCK=block,
        STEP=STEP_BYTES // keys.itemsize,
        TILE=TILE,
        **tile,
    )


def _add_by_key(choice: Choice, pairs: Tensor, rows: Tensor, result: Tensor) -> None:
    """
    Add gradients to their keys, float32 (rows, keys, width).

    A pair's part is `pairs` (tokens, heads, chosen) times `rows` (tokens, heads, width), summed over heads.
    """
    parts, (keys, width) = torch.bmm(pairs.mT, rows), (result.shape[:2].numel(), result.shape[2])
    ordered, order = choice.places.flatten().sort(stable=True)
    boundaries = torch.arange(keys + 1, dtype=torch.int32, device=order.device)
    starts = torch.searchsorted(ordered, boundaries, out_int32=True)
    _add_ordered_parts[(keys,)](
        *(parts, order, starts, result), WIDTH=width, COLUMNS=next_power_of_2(width), **TILES["sums"]
    )


@triton.jit
def _load_rows(tensor, row, WIDTH: constexpr, BLOCK: constexpr):
    """Load rows with WIDTH columns; further columns are 0."""
    column = tl.arange(0, BLOCK)[None, :]
    return load_or_zero(tensor + row.to(tl.int64)[:, None] * WIDTH + column, None if WIDTH == BLOCK else column < WIDTH)


# fmt: off
@cache_launches("count", "columns", "limit")
def _score_visible_keys(
    queries, factors, first_key, ends, keys, scores, count, columns, limit, HEADS: constexpr, WIDTH: constexpr,
    WIDTH_BLOCK: constexpr, BLOCK: constexpr, KEYS: constexpr,
):
    # fmt: on
    """Store scores by token and key; -inf where a token does not see the key."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    row = tl.minimum(token, count - 1)
    begin, end = tl.load(first_key + row), tl.load(ends + row)
    total = tl.zeros((BLOCK, KEYS), tl.float32)
    is_visible = (tl.min(begin) < (tl.program_id(1) + 1) * KEYS) & (tl.max(end) > tl.program_id(1) * KEYS)
    heads = tl.where(is_visible, HEADS, 0)
    block = _load_rows(keys, tl.minimum(key, limit - 1), WIDTH, WIDTH_BLOCK)
    for head in range(0, heads):
        query = _load_rows(queries, row * HEADS + head, WIDTH, WIDTH_BLOCK)
        products = tl.dot(query, block.T, input_precision="ieee")
        total += load_float32(factors + row * HEADS + head, None)[:, None] * tl.maximum(products, 0.0)
    visible = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
    total = tl.where(visible, total, -float("inf"))
    target = scores + token.to(tl.int64)[:, None] * columns + key[None, :]
    tl.store(target, total, mask_tile(token < count, key < columns))


@triton.jit
def _find_keys(places, counts, token, slot, CHOSEN: constexpr):
    """Return a token's chosen keys in slots; behind the last one, the last one."""
    last = tl.load(counts + token) - 1
    return tl.load(places + token * CHOSEN + tl.minimum(slot, last)).to(tl.int64)


@triton.jit
def _locate_tile(counts, CHOSEN: constexpr, TILE: constexpr):
    """Return a program's token, its tile's slots, and which slots have a key."""
    tiles = (CHOSEN + TILE - 1) // TILE
    token = (tl.program_id(0) // tiles).to(tl.int64)
    slot = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    return token, slot, slot < tl.load(counts + token)


@triton.jit
def _multiply(left, right, WIDTH: constexpr, STEP: constexpr):
    """Return (m, n) products, for rows with WIDTH elements at pointers (m, 1) and (n, 1)."""
    total = tl.zeros((left.shape[0], right.shape[0]), tl.float32)
    for first in range(0, WIDTH, STEP):
        column = first + tl.arange(0, STEP)[None, :]
        inside = None if WIDTH % STEP == 0 else column < WIDTH
        near = load_or_zero(right + column, inside)
        total = tl.dot(load_or_zero(left + column, inside), near.T, total, input_precision="ieee")
    return total


# fmt: off
@cache_launches()
def _weigh_keys(
    q, keys, places, counts, pairs, tops, logs, scale, HEADS: constexpr, CHOSEN: constexpr, WIDTH: constexpr,
    STEP: constexpr, BLOCK: constexpr, TILE: constexpr,
):
    # fmt: on
    """Store weights relative to a tile's best score, this score, and the tile's log-sum-exp."""
    token, slot, is_chosen = _locate_tile(counts, CHOSEN, TILE)
    near = keys + _find_keys(places, counts, token, slot, CHOSEN)[:, None] * WIDTH
    for first in range(0, HEADS, BLOCK):
        head = first + tl.arange(0, BLOCK)
        row = token * HEADS + tl.minimum(head, HEADS - 1)
        scores = _multiply(q + row[:, None] * WIDTH, near, WIDTH, STEP) * scale
        scores = tl.where(is_chosen[None, :], scores, -float("inf"))
        top = tl.maximum(tl.max(scores, 1), -1e30)  # finite without a key
        weights = tl.exp(scores - top[:, None])
        tl.store(pairs + row[:, None] * CHOSEN + slot[None, :], weights, mask_tile(head < HEADS, slot < CHOSEN))
        by_tile = tl.program_id(0).to(tl.int64) * HEADS + head
        tl.store(tops + by_tile, top, mask=head < HEADS)
        tl.store(logs + by_tile, top + tl.log(tl.sum(weights, 1)), mask=head < HEADS)


# fmt: off
@cache_launches()
def _mix_kernel(
    pairs, factors, keys, places, counts, result, HEADS: constexpr, ROWS: constexpr, CHOSEN: constexpr,
    WIDTH: constexpr, CHANNELS: constexpr, BLOCK: constexpr, STEP: constexpr, TILE: constexpr,
    COLUMNS: constexpr,
):
    # fmt: on
    """Store a token's mixed keys for some heads and channels; see `_mix_keys`."""
    across, tiles = (CHANNELS + COLUMNS - 1) // COLUMNS, (CHOSEN + TILE - 1) // TILE
    parts = (HEADS + BLOCK - 1) // BLOCK * across
    token = (tl.program_id(0) // parts).to(tl.int64)
    head = tl.program_id(0) % parts // across * BLOCK + tl.arange(0, BLOCK)
    column, row = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS), tl.minimum(head, HEADS - 1)
    inside = None if CHANNELS % COLUMNS == 0 else (column < CHANNELS)[None, :]
    total = tl.zeros((BLOCK, COLUMNS), tl.float32)
    for first in range(0, tl.load(counts + token), STEP):
        slot = first + tl.arange(0, STEP)
        near = keys + _find_keys(places, counts, token, slot, CHOSEN)[:, None] * WIDTH
        near = load_or_zero(near + column[None, :], inside)
        exists = None if CHOSEN % STEP == 0 else (slot < CHOSEN)[None, :]
        pair = load_or_zero(pairs + (token * ROWS + row)[:, None] * CHOSEN + slot[None, :], exists)
        if factors is not None:
            factor = tl.load(factors + (token * tiles + first // TILE) * HEADS + row)
            pair = (pair * factor[:, None]).to(pair.dtype)
        total = tl.dot(pair, near, total, input_precision="ieee")
    target = result + (token * HEADS + row)[:, None] * CHANNELS + column[None, :]
    tl.store(target, total, mask_tile(head < HEADS, column < CHANNELS))


# fmt: off
@cache_launches()
def _sum_heads(
    pairs, factors, sums, HEADS: constexpr, CHOSEN: constexpr, WIDTH: constexpr, STEP: constexpr,
    BLOCK: constexpr, TILE: constexpr,
):
    # fmt: on
    """Store a tile's weights, summed over heads."""
    tiles = (CHOSEN + TILE - 1) // TILE
    token, slot = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    for first in range(0, HEADS, BLOCK):
        head = first + tl.arange(0, BLOCK)
        factor = load_float32(factors + tl.program_id(0).to(tl.int64) * HEADS + head, head < HEADS)
        inside = mask_tile(head < HEADS, slot < CHOSEN)
        weights = load_float32(pairs + (token * HEADS + head)[:, None] * CHOSEN + slot[None, :], inside)
        total += tl.sum(weights * factor[:, None], 0)
    tl.store(sums + token * CHOSEN + slot, total, mask=slot < CHOSEN)


@cache_launches()
def _join_rows(
    q, grad, mixed, rows, means, HEADS: constexpr, WIDTH: constexpr, VALUES: constexpr, BLOCK: constexpr
):
    """Store a head's query and its result's gradient, 0 in further channels, and the product with the result."""
    pair, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    target = rows + (pair // HEADS * 2 * HEADS + pair % HEADS) * WIDTH + column
    to_result = load_or_zero(grad + pair * VALUES + column, column < VALUES)
    result = load_float32(mixed + pair * VALUES + column, column < VALUES)
    tl.store(target, load_or_zero(q + pair * WIDTH + column, column < WIDTH), mask=column < WIDTH)
    tl.store(target + HEADS * WIDTH, to_result, mask=column < WIDTH)
    tl.store(means + pair, tl.sum(to_result.to(tl.float32) * result))


# fmt: off
@cache_launches()
def _differentiate_scores(
    rows, keys, places, counts, logs, means, pairs, scale, HEADS: constexpr, CHOSEN: constexpr,
    WIDTH: constexpr, STEP: constexpr, BLOCK: constexpr, TILE: constexpr,
):
    # fmt: on
    """Store a tile's score gradients, then its weights; rows have queries, then results' gradients."""
    token, slot, is_chosen = _locate_tile(counts, CHOSEN, TILE)
    near = keys + _find_keys(places, counts, token, slot, CHOSEN)[:, None] * WIDTH
    for first in range(0, HEADS, BLOCK):
        head = first + tl.arange(0, BLOCK)
        own = tl.minimum(head, HEADS - 1)
        row, pair = token * 2 * HEADS + own, token * HEADS + own
        query = rows + row[:, None] * WIDTH
        scores, to_weights = tl.zeros((BLOCK, TILE), tl.float32), tl.zeros((BLOCK, TILE), tl.float32)
        for begin in range(0, WIDTH, STEP):
            column = begin + tl.arange(0, STEP)[None, :]
            inside = None if WIDTH % STEP == 0 else column < WIDTH
            channels = load_or_zero(near + column, inside).T
            scores = tl.dot(load_or_zero(query + column, inside), channels, scores, input_precision="ieee")
            to_result = load_or_zero(query + HEADS * WIDTH + column, inside)
            to_weights = tl.dot(to_result, channels, to_weights, input_precision="ieee")
        weights = tl.exp(scores * scale - tl.load(logs + pair)[:, None])
        weights = tl.where(is_chosen[None, :], weights, 0.0)
        to_scores = weights * (to_weights - tl.load(means + pair)[:, None]) * scale
        target, inside = pairs + row[:, None] * CHOSEN + slot[None, :], mask_tile(head < HEADS, slot < CHOSEN)
        tl.store(target, to_scores, inside)
        tl.store(target + HEADS * CHOSEN, weights, inside)


# fmt: off
@cache_launches()
def _differentiate_products(
    queries, keys, places, counts, grad, factors, pairs, to_factors, HEADS: constexpr, CHOSEN: constexpr,
    WIDTH: constexpr, STEP: constexpr, BLOCK: constexpr, TILE: constexpr,
):
    # fmt: on
    """Store a tile's gradients for an indexer's products, and its part in factors' gradients."""
    token, slot, is_chosen = _locate_tile(counts, CHOSEN, TILE)
    near = keys + _find_keys(places, counts, token, slot, CHOSEN)[:, None] * WIDTH
    wanted = load_float32(grad + token * CHOSEN + slot, is_chosen)[None, :]
    for first in range(0, HEADS, BLOCK):
        head = first + tl.arange(0, BLOCK)
        row = token * HEADS + tl.minimum(head, HEADS - 1)
        products = _multiply(queries + row[:, None] * WIDTH, near, WIDTH, STEP)
        to_product = tl.where(products > 0, wanted * load_float32(factors + row, None)[:, None], 0.0)
        tl.store(pairs + row[:, None] * CHOSEN + slot[None, :], to_product, mask_tile(head < HEADS, slot < CHOSEN))
        to_factor = tl.sum(wanted * tl.maximum(products, 0.0), 1)
        tl.store(to_factors + tl.program_id(0).to(tl.int64) * HEADS + head, to_factor, mask=head < HEADS)


@cache_launches()
def _add_ordered_parts(
    parts, order, starts, result, WIDTH: constexpr, COLUMNS: constexpr, ENTRIES: constexpr
):  # fmt: skip
    """Add a key's parts to its result; `order` has their numbers from the key's start on."""
    key = tl.program_id(0).to(tl.int64)
    first, last = tl.load(starts + key), tl.load(starts + key + 1)
    column = tl.arange(0, COLUMNS)
    total = tl.zeros((ENTRIES, COLUMNS), tl.float32)
    for begin in range(first, last, ENTRIES):
        entry = begin + tl.arange(0, ENTRIES)
        number = tl.load(order + entry, mask=entry < last, other=0)
        inside = mask_tile(entry < last, column < WIDTH)
        total += load_float32(parts + number[:, None] * WIDTH + column[None, :], inside)
    target = result + key * WIDTH + column
    if last > first:
        tl.store(target, load_float32(target, column < WIDTH) + tl.sum(total, 0), mask=column < WIDTH)
