"""
Attention to chosen keys in batched matrix products, and choices of keys in Triton; see `eager.py` for the operations.

A token's heads share the chosen keys, so its scores and sums are matrix products with gathered keys. Passes go over
tokens in chunks, which limits their memory. The backward pass gathers keys and computes scores again.

A key's gradient sums over the tokens that chose it. Their parts are stored in 16 bits, one row per token and chosen
key, and added up in float32, token by token. Atomic additions would take as long, and change bits from run to
run.

An indexer's scores are in memory for one chunk and all keys; torch selects the best.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from triton.language import constexpr

from drawloom.kernels.attention.eager import attention_flops
from drawloom.kernels.operation import make_differentiable, once_differentiable, register_kernel
from drawloom.kernels.sparse_attention.eager import choose_keys_eager
from drawloom.kernels.triton.primitives import (
    bmm_fp32,
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
"""Most bytes for a chunk's gathered keys, products and parts of keys' gradients, and for scores with all keys."""

MIN_BLOCK = 64
"""A tile's smallest side in a product; `triton/chunks.py` has the reason."""

MAX_KEY_BYTES = 512
"""Most bytes of an indexer's key, for which shared memory is enough."""

TILES = {
    "scores": {"BLOCK": 64, "KEYS": 128, "num_warps": 4, "num_stages": 3},
    "gather": {"KEYS": 128, "COLUMNS": 64},
    "sums": {"ENTRIES": 8},
}
"""Launch options for an H200: tokens and keys for an indexer's scores, gathered keys, and parts of keys' gradients."""


class Chunk(NamedTuple):
    """
    A slice of all rows' tokens with their chosen keys (tokens, chosen, width), which are 0 if there is none.

    Places are the keys' indices among all rows' keys, int32 (tokens, chosen), or -1; counts are int32 (tokens,).
    """

    tokens: slice
    places: Tensor
    counts: Tensor
    keys: Tensor


def _count_pair_bytes(keys: Tensor, heads: int) -> int:
    """Return bytes per token and chosen key: the key and its gradient, and by head a product and two results."""
    return 2 * keys.itemsize * keys.shape[2] + heads * (4 + 2 * keys.itemsize)


def _gather_chunks(choice: Tensor, keys: Tensor, heads: int) -> Iterator[Chunk]:
    """Yield a choice's chunks; the next one overwrites a chunk's keys."""
    (rows, length, chosen), (total, width) = choice.shape, keys.shape[1:]
    size = max(1, CHUNK_BYTES // (chosen * _count_pair_bytes(keys, heads)))
    offsets = (torch.arange(rows * length, device=choice.device) // length * total).int()
    gathered, tile = keys.new_empty(min(size, rows * length), chosen, width), TILES["gather"]
    for first in range(0, rows * length, size):
        tokens = slice(first, min(first + size, rows * length))
        indices = choice.view(-1, chosen)[tokens]
        places = torch.where(indices < 0, -1, indices + offsets[tokens, None])
        _gather_keys[(cdiv(places.numel(), tile["KEYS"]), cdiv(width, tile["COLUMNS"]))](
            *(keys, places, gathered, places.numel()), WIDTH=width, **tile
        )
        yield Chunk(tokens, places, (indices >= 0).sum(1, dtype=torch.int32), gathered[: len(places)])


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
    scratch=lambda queries, keys, choice: min(CHUNK_BYTES, choice.numel() * _count_pair_bytes(keys, queries.shape[2])),
)
def _choose_keys_backward(
    grads: tuple[Tensor, Tensor, Tensor], grad: Tensor, queries: Tensor, keys: Tensor, factors: Tensor, choice: Tensor
) -> None:
    grad, queries, factors = (x.contiguous().flatten(0, 1) for x in (grad, queries, factors))
    keys, grad_keys = keys.contiguous(), keys.new_zeros(keys.shape, dtype=torch.float32)
    for chunk in _gather_chunks(choice, keys, queries.shape[1]):
        own, near = queries[chunk.tokens], chunk.keys
        pairs = torch.bmm(own, near.mT)
        _differentiate_products[(pairs.shape[:2].numel(),)](
            *(pairs, grad[chunk.tokens], factors[chunk.tokens], grads[2].flatten(0, 1)[chunk.tokens]),
            HEADS=pairs.shape[1],
            **_choose_row_options(pairs),
        )
        torch.bmm(pairs, near, out=grads[0].flatten(0, 1)[chunk.tokens])
        _add_by_key(chunk, pairs, own, grad_keys)
    grads[1].copy_(grad_keys)


def sparse_attention_triton(
    q: Tensor, latents: Tensor, choice: Tensor, value_width: int, scale: float
) -> tuple[Tensor, Tensor]:
    """
    Compute sparse_attention_eager for float32, bfloat16 and float16.

    q (rows, length, heads, width), latents (rows, keys, width), choice int32 (rows, length, chosen); results
    (rows, length, heads, value_width), and float32 (rows, length, chosen).
    """
    check_floats("sparse_attention_triton", q, latents)
    mixed, weights = _differentiable_attention(q, latents, choice, value_width, scale)
    return mixed, weights.detach()


@register_kernel(
    "sparse_attention",
    lambda q, choice, value_width: (
        q.new_empty(*q.shape[:3], value_width),
        q.new_empty(choice.shape, dtype=torch.float32),
    ),
    flops=lambda q, choice, value_width: attention_flops(choice.numel() * q.shape[2], q.shape[3], value_width),
    scratch=lambda q, latents, choice: min(CHUNK_BYTES, choice.numel() * _count_pair_bytes(latents, q.shape[2])),
)
def _attend(
    results: tuple[Tensor, Tensor], q: Tensor, latents: Tensor, choice: Tensor, value_width: int, scale: float
) -> None:
    mixed, sums = (x.flatten(0, 1) for x in results)
    q, heads = q.flatten(0, 1), q.shape[2]
    for chunk in _gather_chunks(choice, latents.contiguous(), heads):
        weights = _weigh_keys(chunk, q[chunk.tokens], heads, scale)
        torch.bmm(weights, chunk.keys[..., :value_width], out=mixed[chunk.tokens])
        torch.sum(weights, 1, dtype=torch.float32, out=sums[chunk.tokens])


@register_kernel(
    "sparse_attention_backward",
    lambda q, latents: (q.new_empty(q.shape), latents.new_empty(latents.shape)),
    flops=lambda grad, q, choice: attention_flops(
        choice.numel() * q.shape[2], q.shape[3], grad.shape[3], backward=True
    ),
    scratch=lambda q, latents, choice: min(CHUNK_BYTES, choice.numel() * _count_pair_bytes(latents, 2 * q.shape[2])),
)
def _attend_backward(
    grads: tuple[Tensor, Tensor], grad: Tensor, q: Tensor, latents: Tensor, choice: Tensor, scale: float
) -> None:
    (heads, width), grad, q = q.shape[2:], grad.flatten(0, 1), q.flatten(0, 1)
    latents, grad_latents = latents.contiguous(), latents.new_zeros(latents.shape, dtype=torch.float32)
    for chunk in _gather_chunks(choice, latents, 2 * heads):
        # Products with keys are scores and weights' gradients; a key's gradient is the sum of these rows times pairs.
        rows = torch.cat([q[chunk.tokens], F.pad(grad[chunk.tokens], (0, width - grad.shape[2]))], 1)
        pairs = _weigh_keys(chunk, rows, heads, scale)
        torch.bmm(pairs[:, :heads], chunk.keys, out=grads[0].flatten(0, 1)[chunk.tokens])
        _add_by_key(chunk, pairs, rows, grad_latents)
    grads[1].copy_(grad_latents)


_differentiable_attention = make_differentiable(
    _attend,
    lambda grad, _, q, latents, choice, value_width, scale: _attend_backward(grad, q, latents, choice, scale),
)


def _weigh_keys(chunk: Chunk, rows: Tensor, heads: int, scale: float) -> Tensor:
    """
    Return weights (tokens, heads, chosen) for queries (tokens, heads, width), the first `heads` of `rows`.

    If results' gradients follow the queries, return scores' gradients, and then weights: (tokens, 2 heads, chosen).
    """
    products = bmm_fp32(rows, chunk.keys.mT)
    pairs = rows.new_empty(products.shape)
    _normalize_scores[(len(rows) * heads,)](
        *(products, chunk.counts, pairs, scale), HEADS=heads, ROWS=rows.shape[1], **_choose_row_options(pairs)
    )
    return pairs


def _choose_row_options(pairs: Tensor) -> dict[str, int]:
    """Return launch options for a program per token and head, whose chosen keys (..., chosen) are in one tile."""
    block = next_power_of_2(pairs.shape[2])
    return {"CHOSEN": pairs.shape[2], "BLOCK": block, "num_warps": max(1, min(32, block // 512))}


def _add_by_key(chunk: Chunk, pairs: Tensor, rows: Tensor, result: Tensor) -> None:
    """
    Add gradients to their keys, float32 (rows, keys, width).

    A pair's part is `pairs` (tokens, heads, chosen) times `rows` (tokens, heads, width), summed over heads.
    """
    parts, (keys, width) = torch.bmm(pairs.mT, rows), (result.shape[:2].numel(), result.shape[2])
    ordered, order = chunk.places.flatten().sort(stable=True)
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


@cache_launches("count")
def _gather_keys(keys, places, gathered, count, WIDTH: constexpr, COLUMNS: constexpr, KEYS: constexpr):
    """Store the keys at `count` places, and 0 for the place -1."""
    entry = tl.program_id(0).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    index = tl.load(places + entry, mask=entry < count, other=-1).to(tl.int64)
    key = load_or_zero(keys + index[:, None] * WIDTH + column[None, :], mask_tile(index >= 0, column < WIDTH))
    tl.store(gathered + entry[:, None] * WIDTH + column[None, :], key, mask_tile(entry < count, column < WIDTH))


@cache_launches()
def _normalize_scores(
    products, counts, pairs, scale, HEADS: constexpr, ROWS: constexpr, CHOSEN: constexpr, BLOCK: constexpr
):  # fmt: skip
    """Store a token's weights for a head in the last HEADS rows, and, if there are more, scores' gradients."""
    token, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    first, slot = (token * ROWS + head) * CHOSEN, tl.arange(0, BLOCK)
    exists, count = slot < CHOSEN, tl.load(counts + token)
    # The mask for loads is not the count's, with which they would have 4 bytes each.
    scores = tl.where(slot < count, load_or_zero(products + first + slot, exists) * scale, -float("inf"))
    weight = tl.exp(scores - tl.max(scores))
    weight /= tl.sum(weight)
    tl.store(pairs + first + (ROWS - HEADS) * CHOSEN + slot, weight, mask=exists)
    if ROWS > HEADS:
        to_weight = load_or_zero(products + first + HEADS * CHOSEN + slot, exists)
        to_score = weight * (to_weight - tl.sum(weight * to_weight)) * scale
        tl.store(pairs + first + slot, to_score, mask=exists)


@cache_launches()
def _differentiate_products(
    products, grad, factors, grad_factors, HEADS: constexpr, CHOSEN: constexpr, BLOCK: constexpr
):
    """Replace a token's products for a head by their gradients, and store the factor's."""
    pair, slot = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    exists, target = slot < CHOSEN, products + pair * CHOSEN + slot
    wanted = load_or_zero(grad + pair // HEADS * CHOSEN + slot, exists)
    product = load_float32(target, exists)
    tl.store(grad_factors + pair, tl.sum(wanted * tl.maximum(product, 0.0)))
    tl.store(target, tl.where(product > 0, wanted * load_float32(factors + pair, None), 0.0), mask=exists)


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
