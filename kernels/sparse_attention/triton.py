"""
Attention to chosen keys in Triton; see `eager.py` for the operations.

Programs have one token, because its heads share the chosen keys, and gather these in blocks. Passes go over tokens in
chunks, which limits their memory, and a chunk's steps meet in memory: weights are stored between scores and sums. A
program for both would need its registers for sums, and Triton then computes scores twice, once in either half of its
warps.

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

from drawloom.kernels.attention.eager import attention_flops
from drawloom.kernels.operation import once_differentiable, register_kernel
from drawloom.kernels.sparse_attention.eager import (
    choose_keys_eager,
    sparse_attention_eager,
)
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
"""Most bytes for a chunk's weights and parts of keys' gradients, and for scores with all keys."""

MIN_BLOCK = 64
"""A tile's smallest side in a product; `triton/chunks.py` has the reason."""

MAX_LATENT_BYTES, MAX_KEY_BYTES = 1152, 512
"""Most bytes in a latent's and an indexer key's tiles, for which shared memory is enough."""

MASKED = tl.constexpr(-1e38)
"""A missing key's score; scores differ by finite numbers."""

MAX_SUMS = 2**15
"""Sums in a program: 128 registers for each thread in 8 warps."""

COLUMNS, ENTRIES = 128, 32
"""A program's columns in keys' gradients, and parts that it loads at a time."""


class Tile(NamedTuple):
    """A program's most heads, or for `index_scores` its tokens, its keys in a block, and its warps and stages."""

    heads: int
    keys: int
    warps: int
    stages: int

    def build_constants(self, heads: int) -> dict[str, int]:
        """Return launch options for a token with this many heads."""
        block = max(MIN_BLOCK, min(self.heads, next_power_of_2(heads)))
        return {"BLOCK": block, "KEYS": self.keys, "num_warps": self.warps, "num_stages": self.stages}


TILES = {
    "index_scores": Tile(128, 128, 8, 3),
    "weights": Tile(128, 64, 8, 1),
    "sums": Tile(128, 64, 8, 3),
    "gradients": Tile(64, 64, 8, 1),
}
"""Tiles by kernel, for an H200; `sums` has no more keys than `weights`."""


class Chunk(NamedTuple):
    """
    A slice in all rows' tokens, their chosen keys among all rows' keys, int32 (tokens, chosen), -1 if there is none,
    and the keys' counts, int32 (tokens,).
    """

    tokens: slice
    places: Tensor
    counts: Tensor


def _split_choice(choice: Tensor, keys: int, pair_bytes: int) -> Iterator[Chunk]:
    """Yield a choice's chunks, for rows with `keys` keys; a token and a chosen key together take `pair_bytes`."""
    (rows, length, chosen), size = choice.shape, max(1, CHUNK_BYTES // (choice.shape[2] * pair_bytes))
    offsets = (torch.arange(rows * length, device=choice.device) // length * keys).int()
    for first in range(0, rows * length, size):
        tokens = slice(first, min(first + size, rows * length))
        indices = choice.view(-1, chosen)[tokens]
        places = torch.where(indices < 0, -1, indices + offsets[tokens, None])
        yield Chunk(tokens, places, (indices >= 0).sum(1, dtype=torch.int32))


def choose_keys_triton(
    queries: Tensor, keys: Tensor, factors: Tensor, first: Tensor, counts: Tensor, chosen: int
) -> tuple[Tensor, Tensor]:
    """
    Compute choose_keys_eager for float32, bfloat16 and float16, in another order; for wide keys, by itself.

    queries (rows, length, heads, width), keys (rows, keys, width), factors (rows, length, heads), first and counts
    int32 (rows, length); results int32 and float32 (rows, length, chosen).
    """
    check_floats("choose_keys_triton", queries, keys, factors)
    if not _fits_in_shared_memory(keys, [keys.shape[2]], MAX_KEY_BYTES):
        return choose_keys_eager(queries, keys, factors, first, counts, chosen)
    return _Choice.apply(queries, keys, factors, first, counts, chosen)  # type: ignore[no-untyped-call, no-any-return]


class _Choice(Function):
    """Chosen keys and their scores, which have gradients."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, factors: Tensor, first: Tensor, counts: Tensor, chosen: int
    ) -> tuple[Tensor, Tensor]:
        """Return indices and scores, both (rows, length, chosen)."""
        choice, scores = _choose_keys(queries, keys, factors, first, counts, chosen)
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
    scratch=lambda queries, keys: min(SCORE_BYTES, 4 * queries.shape[:2].numel() * keys.shape[1]),
)
def _choose_keys(
    results: tuple[Tensor, Tensor],
    queries: Tensor,
    keys: Tensor,
    factors: Tensor,
    first: Tensor,
    counts: Tensor,
    chosen: int,
) -> None:
    (rows, length, heads, width), total = queries.shape, keys.shape[1]
    tile, slot = TILES["index_scores"], torch.arange(chosen, dtype=torch.int32, device=keys.device)
    ends, size = first + counts, max(1, SCORE_BYTES // (4 * max(total, chosen)))
    for row, begin in product(range(rows), range(0, length, size)):
        tokens = slice(begin, min(begin + size, length))
        limit = min(total, tokens.stop + total - length)
        scores = keys.new_empty(tokens.stop - begin, max(limit, chosen), dtype=torch.float32)
        _score_visible_keys[tuple(map(cdiv, scores.shape, (tile.heads, tile.keys)))](
            *(x[row, tokens].contiguous() for x in (queries, factors, first, ends)),
            *(keys[row].contiguous(), scores, *scores.shape, limit),
            HEADS=heads,
            WIDTH=width,
            WIDTH_BLOCK=_block(width),
            **tile.build_constants(tile.heads),
        )
        begins, seen = first[row, tokens, None], counts[row, tokens, None]
        best = scores.topk(chosen, sorted=False).indices
        best = torch.where(seen > chosen, best, torch.where(slot < seen, begins + slot, -1))
        results[0][row, tokens] = best
        results[1][row, tokens] = scores.gather(1, best.clamp(min=0)).masked_fill(best < 0, -torch.inf)


def _count_index_pair_bytes(queries: Tensor) -> int:
    """Return bytes per token and chosen key: float32 temporaries, products and gradients by head, and two keys."""
    heads, width = queries.shape[-2:]
    return heads * (8 + 2 * queries.itemsize) + 2 * width * queries.itemsize


@register_kernel(
    "choose_keys_backward",
    lambda queries, keys, factors: tuple(x.new_empty(x.shape) for x in (queries, keys, factors)),
    flops=lambda queries, choice: 6.0 * queries.shape[2:].numel() * choice.numel(),
    scratch=lambda queries, choice: min(CHUNK_BYTES, _count_index_pair_bytes(queries) * choice.numel()),
)
def _choose_keys_backward(
    grads: tuple[Tensor, Tensor, Tensor], grad: Tensor, queries: Tensor, keys: Tensor, factors: Tensor, choice: Tensor
) -> None:
    grad, queries, factors = (x.contiguous().flatten(0, 1) for x in (grad, queries, factors))
    keys, grad_keys = keys.contiguous(), keys.new_zeros(keys.shape, dtype=torch.float32)
    for chunk in _split_choice(choice, keys.shape[1], _count_index_pair_bytes(queries)):
        own, near = queries[chunk.tokens], keys.flatten(0, 1)[chunk.places.clamp(min=0)]
        products = torch.bmm(own, near.mT)
        wanted = grad[chunk.tokens].masked_fill(chunk.places < 0, 0.0)[:, None]
        pairs = (wanted * factors[chunk.tokens, :, None] * (products > 0)).to(own.dtype)
        grads[0].flatten(0, 1)[chunk.tokens] = torch.bmm(pairs, near)
        grads[2].flatten(0, 1)[chunk.tokens] = (wanted * products.relu()).sum(2).to(factors.dtype)
        _add_by_key(chunk, pairs, own, grad_keys)
    grads[1].copy_(grad_keys)


def sparse_attention_triton(
    q: Tensor, latents: Tensor, choice: Tensor, value_width: int, scale: float
) -> tuple[Tensor, Tensor]:
    """
    Compute sparse_attention_eager for float32, bfloat16 and float16; for wide latents, by itself.

    q (rows, length, heads, width), latents (rows, keys, width), choice int32 (rows, length, chosen); results
    (rows, length, heads, value_width), and float32 (rows, length, chosen).
    """
    check_floats("sparse_attention_triton", q, latents)
    if not _fits_in_shared_memory(latents, [value_width, latents.shape[2] - value_width], MAX_LATENT_BYTES):
        return sparse_attention_eager(q, latents, choice, value_width, scale)
    return _SparseAttention.apply(q, latents, choice, value_width, scale)  # type: ignore[no-untyped-call, no-any-return]


class _SparseAttention(Function):
    """Attention that saves its inputs, its result and the scores' log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, latents: Tensor, choice: Tensor, value_width: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return results (rows, length, heads, value_width), and weights' sums (rows, length, chosen)."""
        mixed, weights, lse = _attend(q, latents, choice, value_width, scale)
        ctx.save_for_backward(q, latents, choice, mixed, lse)
        ctx.mark_non_differentiable(weights)
        ctx.scale = scale
        return mixed, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = _attend_backward(grad, *ctx.saved_tensors, ctx.scale)  # type: ignore[call-arg]
        return *grads, None, None, None


@register_kernel(
    "sparse_attention",
    lambda q, choice, value_width: (
        q.new_empty(*q.shape[:3], value_width),
        q.new_empty(choice.shape, dtype=torch.float32),
        q.new_empty(q.shape[:3], dtype=torch.float32),
    ),
    flops=lambda q, choice, value_width: attention_flops(choice.numel() * q.shape[2], q.shape[3], value_width),
    scratch=lambda q, choice: min(CHUNK_BYTES, q.itemsize * q.shape[2] * choice.numel()),
)
def _attend(
    results: tuple[Tensor, Tensor, Tensor], q: Tensor, latents: Tensor, choice: Tensor, value_width: int, scale: float
) -> None:
    mixed, sums, lse = (x.flatten(0, 1) for x in results)
    q, latents, (heads, chosen) = q.contiguous().flatten(0, 1), latents.contiguous(), (q.shape[2], choice.shape[2])
    constants = _build_constants(q, value_width, chosen) | TILES["weights"].build_constants(heads)
    groups, blocks = cdiv(heads, constants["BLOCK"]), cdiv(chosen, constants["KEYS"])
    sum_groups = cdiv(heads, TILES["sums"].build_constants(heads)["BLOCK"])
    for chunk in _split_choice(choice, latents.shape[1], heads * q.itemsize):
        count = len(chunk.counts)
        weights = q.new_empty(count, heads, chosen)
        maxima = q.new_empty(count, heads, blocks, dtype=torch.float32)
        parts = lse.new_zeros(sum_groups, count, chosen)
        _weigh_keys[(count * groups,)](
            *(q[chunk.tokens], latents, chunk.places, chunk.counts, weights, maxima, lse[chunk.tokens], scale),
            **constants,
        )
        _sum_rows(chunk, weights, latents, mixed, value_width, maxima, lse[chunk.tokens], parts)
        torch.sum(parts, 0, out=sums[chunk.tokens])


def _count_pair_bytes(q: Tensor, latents: Tensor) -> int:
    """Return bytes per token and chosen key for weights and their gradients by head, and a part in the key's."""
    return q.itemsize * (2 * q.shape[2] + latents.shape[2])


@register_kernel(
    "sparse_attention_backward",
    lambda q, latents: (q.new_empty(q.shape), latents.new_empty(latents.shape)),
    flops=lambda q, choice, mixed: attention_flops(
        choice.numel() * q.shape[2], q.shape[3], mixed.shape[3], backward=True
    ),
    scratch=lambda q, latents, choice: min(CHUNK_BYTES, _count_pair_bytes(q, latents) * choice.numel()),
)
def _attend_backward(
    grads: tuple[Tensor, Tensor],
    grad: Tensor,
    q: Tensor,
    latents: Tensor,
    choice: Tensor,
    mixed: Tensor,
    lse: Tensor,
    scale: float,
) -> None:
    (heads, width), chosen, pair_bytes = q.shape[2:], choice.shape[2], _count_pair_bytes(q, latents)
    grad, q, mixed, lse = (x.contiguous().flatten(0, 1) for x in (grad, q, mixed, lse))
    latents, grad_latents = latents.contiguous(), latents.new_zeros(latents.shape, dtype=torch.float32)
    constants = _build_constants(q, mixed.shape[2], chosen) | TILES["gradients"].build_constants(heads)
    for chunk in _split_choice(choice, latents.shape[1], pair_bytes):
        count, tokens = len(chunk.counts), chunk.tokens
        pairs = q.new_empty(count, 2 * heads, chosen)  # gradients of scores, and weights
        _compute_score_gradients[(count * cdiv(heads, constants["BLOCK"]),)](
            *(q[tokens], grad[tokens], mixed[tokens], latents, chunk.places, chunk.counts, lse[tokens], pairs),
            scale,
            **constants,
        )
        _sum_rows(chunk, pairs, latents, grads[0], width)
        # A latent's part is its score gradients times queries, and its weights times results' gradients.
        factors = torch.cat([q[tokens], F.pad(grad[tokens], (0, width - grad.shape[2]))], 1)
        _add_by_key(chunk, pairs, factors, grad_latents)
    grads[1].copy_(grad_latents)


def _fits_in_shared_memory(keys: Tensor, widths: list[int], max_bytes: int) -> bool:
    """Return whether programs have enough shared memory for keys (..., width) in tiles this wide."""
    has_memory = not keys.is_cuda or has_large_shared_memory(keys.device)
    return has_memory and sum(map(_block, widths)) * keys.itemsize <= max_bytes


def _block(width: int) -> int:
    """Return the tile's columns for `width` columns."""
    return max(MIN_BLOCK, next_power_of_2(max(1, width)))


def _build_constants(q: Tensor, value_width: int, chosen: int) -> dict[str, Any]:
    """Return constants for latents with a value and further channels, from q (tokens, heads, width)."""
    _, heads, width = q.shape
    rest = width - value_width
    return {
        "HEADS": heads,
        "VALUE": value_width,
        "REST": rest,
        "VALUE_BLOCK": _block(value_width),
        "REST_BLOCK": _block(rest),
        "CHOSEN": chosen,
    }


def _sum_rows(
    chunk: Chunk,
    weights: Tensor,
    latents: Tensor,
    result: Tensor,
    columns: int,
    maxima: Tensor | None = None,
    lse: Tensor | None = None,
    sums: Tensor | None = None,
) -> None:
    """
    Fill the chunk's tokens in `result` (..., heads, columns) with chosen latents' weighted sums.

    weights (tokens, heads or more, chosen) are factors. With `maxima` (tokens, heads, blocks) and `lse` (tokens, heads)
    they are relative to a block's maximum, and `sums` (groups, tokens, chosen) gets their sums over a group's heads.
    """
    result = result.view(-1, *result.shape[-2:])[chunk.tokens]
    (count, heads, _), chosen = result.shape, weights.shape[2]
    constants = TILES["sums"].build_constants(heads)
    groups, main = cdiv(heads, constants["BLOCK"]), 1 << (columns.bit_length() - 1)
    part = min(main, MAX_SUMS // constants["BLOCK"])
    _sum_chosen_rows[(count * groups, cdiv(main, part))](
        *(weights, latents, chunk.places, chunk.counts, maxima, lse, sums, result, count),
        WEIGHT_ROWS=weights.shape[1],
        WIDTH=latents.shape[-1],
        MAXIMA_KEYS=TILES["weights"].keys,
        **_build_constants(result, main, chosen) | {"VALUE_BLOCK": _block(part)} | constants,
    )


def _add_by_key(chunk: Chunk, pairs: Tensor, factors: Tensor, result: Tensor) -> None:
    """
    Add gradients to their keys, float32 (rows, keys, width).

    A pair's part is `pairs` (tokens, heads, chosen) times `factors` (tokens, heads, width), summed over heads.
    """
    parts, (keys, width) = torch.bmm(pairs.mT, factors), (result.shape[:2].numel(), result.shape[2])
    ordered, order = chunk.places.flatten().sort(stable=True)
    boundaries = torch.arange(keys + 1, dtype=torch.int32, device=order.device)
    starts = torch.searchsorted(ordered, boundaries, out_int32=True)
    _add_ordered_parts[(keys, cdiv(width, COLUMNS))](
        *(parts, order, starts, result), WIDTH=width, COLUMNS=COLUMNS, ENTRIES=ENTRIES, num_warps=4
    )


@triton.jit
def _locate_heads(HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the program's token, its group and heads, and whether they exist; others repeat the last."""
    GROUPS: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    group = tl.program_id(0) % GROUPS
    head = group * BLOCK + tl.arange(0, BLOCK)
    return (tl.program_id(0) // GROUPS).to(tl.int64), group, tl.minimum(head, HEADS - 1), head < HEADS


@triton.jit
def _load_columns(tensor, row, WIDTH: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load SIZE columns, from FIRST on, in rows with WIDTH columns; further columns are 0."""
    column = tl.arange(0, BLOCK)[None, :]
    mask = None if SIZE == BLOCK else column < SIZE
    return load_or_zero(tensor + row.to(tl.int64)[:, None] * WIDTH + (FIRST + column), mask)


@triton.jit
def _store_columns(
    tensor, row, is_row, x, WIDTH: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    tl.store(tensor + row[:, None] * WIDTH + (FIRST + column)[None, :], x, mask=mask_tile(is_row, column < SIZE))


@triton.jit
def _locate_keys(places, token, start, count, CHOSEN: tl.constexpr, KEYS: tl.constexpr):
    """Return a block's slots in the token's choice, whether they have keys, and the keys; others are the first key."""
    slot = start + tl.arange(0, KEYS)
    inside = slot < count
    return slot, inside, tl.load(places + token * CHOSEN + slot, mask=inside, other=0)


@triton.jit
def _multiply_both(query, value, query_rest, rest, scale):
    """Add query @ value.T and query_rest @ rest.T, both scaled, in float32."""
    # One product's result is not the other's operand: Triton would give all warps the same columns.
    products = tl.dot(query, value.T, input_precision="ieee") * scale
    return products + tl.dot(query_rest, rest.T, input_precision="ieee") * scale


# fmt: off
@cache_launches("count", "columns", "limit")
def _score_visible_keys(
    queries, factors, first, ends, keys, scores, count, columns, limit, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):
    # fmt: on
    """Store scores by token and key; -inf where a token does not see the key."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    row = tl.minimum(token, count - 1)
    begin, end = tl.load(first + row), tl.load(ends + row)
    total = tl.zeros((BLOCK, KEYS), tl.float32)
    is_visible = (tl.min(begin) < (tl.program_id(1) + 1) * KEYS) & (tl.max(end) > tl.program_id(1) * KEYS)
    heads = tl.where(is_visible, HEADS, 0)
    block = _load_columns(keys, tl.minimum(key, limit - 1), WIDTH, 0, WIDTH, WIDTH_BLOCK)
    for head in range(0, heads):
        query = _load_columns(queries, row * HEADS + head, WIDTH, 0, WIDTH, WIDTH_BLOCK)
        products = tl.dot(query, block.T, input_precision="ieee")
        total += load_float32(factors + row * HEADS + head, None)[:, None] * tl.maximum(products, 0.0)
    visible = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
    total = tl.where(visible, total, -float("inf"))
    target = scores + token.to(tl.int64)[:, None] * columns + key[None, :]
    tl.store(target, total, mask_tile(token < count, key < columns))


# fmt: off
@cache_launches()
def _weigh_keys(
    q, latents, places, counts, weights, maxima, lse, scale, HEADS: tl.constexpr, VALUE: tl.constexpr,
    REST: tl.constexpr, VALUE_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr,
):
    # fmt: on
    """Store weights relative to the largest score so far, these maxima by block, and log-sum-exp."""
    WIDTH: tl.constexpr = VALUE + REST
    token, _group, head, is_head = _locate_heads(HEADS, BLOCK)
    row, count = token * HEADS + head, tl.load(counts + token)
    query = _load_columns(q, row, WIDTH, 0, VALUE, VALUE_BLOCK)
    query_rest = _load_columns(q, row, WIDTH, VALUE, REST, REST_BLOCK)
    largest, total = tl.full((BLOCK,), MASKED, tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, KEYS):
        slot, inside, key = _locate_keys(places, token, start, count, CHOSEN, KEYS)
        value = _load_columns(latents, key, WIDTH, 0, VALUE, VALUE_BLOCK)
        rest = _load_columns(latents, key, WIDTH, VALUE, REST, REST_BLOCK)
        scores = _multiply_both(query, value, query_rest, rest, scale)
        scores = tl.where(inside[None, :], scores, MASKED)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weight = tl.exp(scores - new_largest[:, None])
        total = total * tl.exp(largest - new_largest) + tl.sum(weight, 1)
        largest = new_largest
        tl.store(maxima + row * ((CHOSEN + KEYS - 1) // KEYS) + start // KEYS, largest, mask=is_head)
        tl.store(weights + row[:, None] * CHOSEN + slot[None, :], weight, mask=mask_tile(is_head, inside))
    tl.store(lse + row, largest + tl.log(total), mask=is_head)


# fmt: off
@cache_launches("tokens")
def _sum_chosen_rows(
    weights, latents, places, counts, maxima, lse, sums, result, tokens, WEIGHT_ROWS: tl.constexpr,
    WIDTH: tl.constexpr, MAXIMA_KEYS: tl.constexpr, HEADS: tl.constexpr, VALUE: tl.constexpr, REST: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
):
    # fmt: on
    """
    Store some columns in a token's weighted sums by head, and its weights' sums over a group's heads.

    The last program for a group also has the REST columns; others do not store them.
    """
    BLOCKS: tl.constexpr = (CHOSEN + MAXIMA_KEYS - 1) // MAXIMA_KEYS
    PART: tl.constexpr = VALUE if VALUE < VALUE_BLOCK else VALUE_BLOCK
    token, group, head, is_head = _locate_heads(HEADS, BLOCK)
    row, count = token * HEADS + head, tl.load(counts + token)
    if lse is not None:
        statistic = tl.load(lse + row)
    column = tl.program_id(1) * VALUE_BLOCK
    is_last = column + VALUE_BLOCK >= VALUE
    mixed, mixed_rest = tl.zeros((BLOCK, VALUE_BLOCK), tl.float32), tl.zeros((BLOCK, REST_BLOCK), tl.float32)
    for start in range(0, count, KEYS):
        slot, inside, key = _locate_keys(places, token, start, count, CHOSEN, KEYS)
        weight_at = weights + (token * WEIGHT_ROWS + head)[:, None] * CHOSEN + slot[None, :]
        weight = load_or_zero(weight_at, mask_tile(is_head, inside))
        if lse is not None:
            largest = tl.load(maxima + row * BLOCKS + start // MAXIMA_KEYS)
            exact = weight.to(tl.float32) * tl.exp(largest - statistic)[:, None]
            is_own = slot < tl.where(is_last, count, 0)
            tl.store(sums + (group * tokens + token) * CHOSEN + slot, tl.sum(exact, 0), mask=is_own)
            weight = exact.to(latents.dtype.element_ty)
        value = _load_columns(latents + column, key, WIDTH, 0, PART, VALUE_BLOCK)
        mixed = tl.dot(weight, value, mixed, input_precision="ieee")
        if REST > 0:
            rest = _load_columns(latents, key, WIDTH, VALUE, REST, REST_BLOCK)
            mixed_rest = tl.dot(weight, rest, mixed_rest, input_precision="ieee")
    _store_columns(result + column, row, is_head, mixed, VALUE + REST, 0, PART, VALUE_BLOCK)
    if REST > 0:
        is_own_head = is_head & (head < tl.where(is_last, HEADS, 0))
        _store_columns(result, row, is_own_head, mixed_rest, VALUE + REST, VALUE, REST, REST_BLOCK)


# fmt: off
@cache_launches()
def _compute_score_gradients(
    q, grad, mixed, latents, places, counts, lse, pairs, scale, HEADS: tl.constexpr, VALUE: tl.constexpr,
    REST: tl.constexpr, VALUE_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr,
):
    # fmt: on
    """Store scores' gradients in the first half in a token's pairs, and weights in the other one."""
    WIDTH: tl.constexpr = VALUE + REST
    token, _group, head, is_head = _locate_heads(HEADS, BLOCK)
    row, count = token * HEADS + head, tl.load(counts + token)
    query = _load_columns(q, row, WIDTH, 0, VALUE, VALUE_BLOCK)
    query_rest = _load_columns(q, row, WIDTH, VALUE, REST, REST_BLOCK)
    wanted = _load_columns(grad, row, VALUE, 0, VALUE, VALUE_BLOCK)
    result = _load_columns(mixed, row, VALUE, 0, VALUE, VALUE_BLOCK)
    along, statistic = tl.sum(wanted.to(tl.float32) * result.to(tl.float32), 1), tl.load(lse + row)
    for start in range(0, count, KEYS):
        slot, inside, key = _locate_keys(places, token, start, count, CHOSEN, KEYS)
        value = _load_columns(latents, key, WIDTH, 0, VALUE, VALUE_BLOCK)
        rest = _load_columns(latents, key, WIDTH, VALUE, REST, REST_BLOCK)
        scores = _multiply_both(query, value, query_rest, rest, scale)
        to_weight = tl.dot(wanted, value.T, input_precision="ieee")
        weight = tl.exp(scores - statistic[:, None])
        to_score = weight * (to_weight - along[:, None]) * scale
        is_pair = mask_tile(is_head, inside)
        target = pairs + (2 * token * HEADS + head)[:, None] * CHOSEN + slot[None, :]
        tl.store(target, to_score, mask=is_pair)
        tl.store(target + HEADS * CHOSEN, weight, mask=is_pair)


@cache_launches()
def _add_ordered_parts(
    parts, order, starts, result, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ENTRIES: tl.constexpr
):  # fmt: skip
    """Add a key's parts to its result; `order` has their numbers from the key's start on."""
    key = tl.program_id(0).to(tl.int64)
    first, last = tl.load(starts + key), tl.load(starts + key + 1)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ENTRIES, COLUMNS), tl.float32)
    for begin in range(first, last, ENTRIES):
        entry = begin + tl.arange(0, ENTRIES)
        number = tl.load(order + entry, mask=entry < last, other=0)
        inside = mask_tile(entry < last, column < WIDTH)
        total += load_float32(parts + number[:, None] * WIDTH + column[None, :], inside)
    target = result + key * WIDTH + column
    if last > first:
        tl.store(target, load_float32(target, column < WIDTH) + tl.sum(total, 0), mask=column < WIDTH)
