"""
Routing tables in Triton: a stable counting sort without atomics, and therefore deterministic.

A program in the first kernel counts every expert's choices in one part. The second kernel computes the counts' prefix
sums over parts. The third computes every choice's row: lower experts come first, then earlier parts, then earlier
choices in the part.

Permuting tokens to their experts' rows, and summing rows by token, in Triton.

A program processes one token and all its choices, whose rows it reads or writes together; a token is read or written
once. A fixed number of further programs zero the unused rows, counted only on the device.

Expert parallelism by reading other GPUs' memory, in Triton: one launch per operation in an exchange.

A program processes one token, and reads the token from its rank. Loads from another GPU take longer than local loads;
to hide this there are many programs, and a program loads a whole tile before using it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from triton.language import constexpr

from drawloom.kernels.moe.eager import DROPPED, PeerTensors
from drawloom.kernels.operation import once_differentiable, register_kernel
from drawloom.kernels.results import PermutedRows, Routes
from drawloom.kernels.triton.primitives import (
    cache_launches,
    cdiv,
    check_floats,
    load_float32,
    load_or_zero,
    mask_tile,
    next_power_of_2,
    view_as_rows,
)

ENTRIES, STEP = 256, 32
"""Choices in a part, and how many of them a choice is compared with at a time: larger tiles would not fit."""

PARTS, EXPERTS = 1024, 4
"""Tile of counts that a program of the prefix sums loads at a time."""

MAX_CHOICES = 2**31 - 1
"""Most choices, since row indices have 32 bits."""


def moe_routes_triton(expert_indices: Tensor, num_experts: int) -> Routes:
    """Compute moe_routes_eager: expert_indices int32 or int64 (tokens, top_k), -1 for dropped choices."""
    if expert_indices.numel() > MAX_CHOICES:
        raise ValueError(
            f"{expert_indices.numel()} choices are more than 32-bit row indices can number, {MAX_CHOICES}; "
            "use fewer tokens"
        )
    return Routes(*_compute_routes(expert_indices, num_experts))


def _allocate_tables(expert_indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = expert_indices.new_empty(expert_indices.shape, dtype=torch.int32)
    return rows, rows.new_empty(expert_indices.numel()), rows.new_empty(num_experts)


@register_kernel("moe_routes", _allocate_tables)
def _compute_routes(tables: tuple[Tensor, Tensor, Tensor], expert_indices: Tensor, num_experts: int) -> None:
    """Fill the tables of `Routes`: dest_row, source_choice and offsets."""
    rows, choices, offsets = tables
    count = expert_indices.numel()
    if not count or not num_experts:
        rows.fill_(DROPPED)
        choices.fill_(DROPPED)
        offsets.zero_()
        return
    flat, width = expert_indices.contiguous(), next_power_of_2(num_experts)
    parts = cdiv(count, ENTRIES)
    counts, totals = rows.new_empty(parts, width), rows.new_empty(width)
    _count_choices_by_expert_kernel[(parts,)](flat, counts, count, ENTRIES=ENTRIES, WIDTH=width)
    experts = min(EXPERTS, width)
    _prefix_sum_kernel[(width // experts,)](
        counts, totals, parts, WIDTH=width, EXPERTS=experts, PARTS=PARTS, num_warps=8
    )
    _assign_rows_kernel[(parts,)](
        flat,
        counts,
        totals,
        offsets,
        rows,
        choices,
        count,
        num_experts,
        ENTRIES=ENTRIES,
        WIDTH=width,
        STEP=STEP,
        num_warps=8,
    )


@cache_launches("count")
def _count_choices_by_expert_kernel(expert_indices, counts, count, ENTRIES: constexpr, WIDTH: constexpr):
    part = tl.program_id(0).to(tl.int64)
    entry = part * ENTRIES + tl.arange(0, ENTRIES)
    expert = tl.load(expert_indices + entry, mask=entry < count, other=-1).to(tl.int32)
    tl.store(counts + part * WIDTH + tl.arange(0, WIDTH), tl.histogram(expert, WIDTH, mask=expert >= 0))


@cache_launches("parts")
def _prefix_sum_kernel(counts, totals, parts, WIDTH: constexpr, EXPERTS: constexpr, PARTS: constexpr):
    """Replace every count by the sum over all earlier parts (an exclusive prefix sum); store the totals."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, parts, PARTS):
        part = (start + tl.arange(0, PARTS))[:, None]
        at = counts + part.to(tl.int64) * WIDTH + expert[None, :]
        count = load_or_zero(at, part < parts)
        tl.store(at, total[None, :] + tl.cumsum(count, 0) - count, mask=part < parts)
        total += tl.sum(count, 0)
    tl.store(totals + expert, total)


# fmt: off
@cache_launches("count")
def _assign_rows_kernel(
    expert_indices, earlier, totals, offsets, rows, choices, count, num_experts,
    ENTRIES: constexpr, WIDTH: constexpr, STEP: constexpr,
):
    # fmt: on
    part, index, column = tl.program_id(0).to(tl.int64), tl.arange(0, ENTRIES), tl.arange(0, WIDTH)
    entry = part * ENTRIES + index
    expert = tl.load(expert_indices + entry, mask=entry < count, other=-1).to(tl.int32)
    has_row = expert >= 0
    in_earlier_parts = load_or_zero(earlier + part * WIDTH + expert, has_row)
    total = tl.load(totals + column)
    end = tl.cumsum(total, 0)
    of_lower_experts = tl.gather(end - total, tl.where(has_row, expert, 0), 0)
    before = tl.zeros((ENTRIES, STEP), tl.int32)
    for start in tl.static_range(0, ENTRIES, STEP):
        # Loaded again along the other axis: cheaper than a transpose through shared memory.
        other = start + tl.arange(0, STEP)[None, :]
        same = tl.load(expert_indices + part * ENTRIES + other, mask=part * ENTRIES + other < count, other=-1)
        before += ((expert[:, None] == same.to(tl.int32)) & (other < index[:, None])).to(tl.int32)
    row = of_lower_experts + in_earlier_parts + tl.sum(before, 1)
    tl.store(rows + entry, tl.where(has_row, row, -1), mask=entry < count)
    tl.store(choices + row, entry.to(tl.int32), mask=has_row)
    if part == 0:
        tl.store(offsets + column, end, mask=column < num_experts)
    unused = entry >= tl.max(end, 0)
    tl.store(choices + entry, tl.full((ENTRIES,), -1, tl.int32), mask=(entry < count) & unused)


TILE = 4096
"""Elements of all choices that a program processes at a time."""

ELEMENTS_PER_WARP = 512
"""Elements per warp."""

FILLERS = 64
"""Programs that zero unused rows."""


def moe_permute_triton(x: Tensor, probabilities: Tensor, routes: Routes) -> PermutedRows:
    """
    Compute moe_permute_eager for float32, bfloat16 and float16.

    x (tokens, hidden_size), probabilities (tokens, top_k); returns (tokens * top_k, hidden_size) and
    (tokens * top_k,).
    """
    check_floats("moe_permute_triton", x, probabilities)
    return PermutedRows._make(_Permute.apply(x, probabilities, *routes))  # type: ignore[no-untyped-call]


def moe_unpermute_triton(rows: Tensor, routes: Routes, probabilities: Tensor | None = None) -> Tensor:
    """
    Compute moe_unpermute_eager for float32, bfloat16 and float16.

    rows (tokens * top_k, hidden_size), probabilities (tokens, top_k); returns (tokens, hidden_size).
    """
    check_floats("moe_unpermute_triton", rows)
    summed: Tensor = _Unpermute.apply(rows, probabilities, *routes)  # type: ignore[no-untyped-call]
    return summed


class _Permute(Function):
    """Copy to rows, whose backward pass is a sum by token."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probabilities: Tensor, dest_row: Tensor, choices: Tensor, offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return rows (rows, hidden_size) from x (tokens, hidden_size), and their probabilities (rows,)."""
        ctx.save_for_backward(dest_row)
        rows, row_scalars, _ = _copy_tokens_to_rows(x, None, probabilities, dest_row, offsets, len(choices), False)
        return rows, row_scalars

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_probabilities: Tensor) -> tuple[Tensor | None, ...]:
        (dest_row,) = ctx.saved_tensors
        return *sum_rows_and_gather_scalars(grad, None, grad_probabilities, dest_row), None, None, None


class _Unpermute(Function):
    """Sum by token, whose backward pass copies to rows and computes a dot product per probability gradient."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, probabilities: Tensor | None, dest_row: Tensor, choices: Tensor, offsets: Tensor
    ) -> Tensor:
        """Return (tokens, hidden_size) in the dtype of rows (rows, hidden_size); probabilities are (tokens, top_k)."""
        ctx.needs_probabilities, ctx.count = ctx.needs_input_grad[1], len(choices)
        ctx.save_for_backward(rows if ctx.needs_probabilities else None, probabilities, dest_row, offsets)
        return sum_rows_and_gather_scalars(rows, probabilities, None, dest_row)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, probabilities, dest_row, offsets = ctx.saved_tensors
        weighted = probabilities is not None
        grad_rows, _, products = _copy_tokens_to_rows(grad, rows, probabilities, dest_row, offsets, ctx.count, weighted)
        return grad_rows, products.to(probabilities.dtype) if ctx.needs_probabilities else None, None, None, None


def _allocate_copied_rows(
    x: Tensor,
    others: Tensor | None,
    probabilities: Tensor | None,
    dest_row: Tensor,
    count: int,
    weighted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `count` rows; their probabilities, empty if `weighted`; and the product with `others` by choice."""
    has_scalars = probabilities is not None and not weighted
    dtype = x.dtype if probabilities is None else probabilities.dtype
    row_scalars = x.new_empty(count if has_scalars else 0, dtype=dtype)
    products = x.new_empty(dest_row.shape if others is not None else 0, dtype=torch.float32)
    return x.new_empty(count, x.shape[1]), row_scalars, products


@register_kernel("moe_spread", _allocate_copied_rows)
def _copy_tokens_to_rows(
    results: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    others: Tensor | None,
    probabilities: Tensor | None,
    dest_row: Tensor,
    offsets: Tensor,
    count: int,
    weighted: bool,
) -> None:
    """
    Copy tokens to their choices' rows, times probabilities if `weighted`. Results are as in `_allocate_copied_rows`.

    x (tokens, hidden_size), others (count, hidden_size), probabilities and dest_row (tokens, top_k), offsets
    (experts,). A product is a token's dot product with its choice's row in `others`, the probability's gradient.
    """
    rows, row_scalars, products = results
    if not dest_row.numel():
        return
    if not len(offsets):
        for result in results:
            result.zero_()
        return
    x, tokens = view_as_rows(x) if x.numel() else x, len(dest_row)
    _copy_tokens_zero_unused_kernel[(tokens + FILLERS,)](
        x,
        None if others is None else view_as_rows(others),
        None if probabilities is None else probabilities.contiguous(),
        dest_row,
        offsets,
        rows,
        row_scalars if len(row_scalars) else None,
        products if products.numel() else None,
        tokens,
        count,
        len(offsets),
        x.shape[1],
        x.stride(0),
        0 if others is None else view_as_rows(others).stride(0),
        WEIGHTED=weighted,
        **choose_tile_constants(dest_row.shape[1], x.shape[1]),
    )


def _allocate_sums(rows: Tensor, row_scalars: Tensor | None, dest_row: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums by token, and row scalars by choice."""
    summed = rows.new_empty(len(dest_row), rows.shape[1])
    return summed, rows.new_empty(0) if row_scalars is None else row_scalars.new_empty(dest_row.shape)


@register_kernel("moe_gather", _allocate_sums)
def sum_rows_and_gather_scalars(
    results: tuple[Tensor, Tensor],
    rows: Tensor,
    probabilities: Tensor | None,
    row_scalars: Tensor | None,
    dest_row: Tensor,
) -> None:
    """Sum rows by token, times the choices' probabilities if any; `row_scalars` has a scalar per row."""
    summed, scalars_by_choice = results
    if not dest_row.numel():
        summed.zero_()
        return
    rows = view_as_rows(rows) if rows.numel() else rows
    sum_rows_by_token_into(
        rows, probabilities, row_scalars, dest_row, summed, None if row_scalars is None else scalars_by_choice
    )


def sum_rows_by_token_into(
    rows: Tensor,
    probabilities: Tensor | None,
    row_scalars: Tensor | None,
    dest_row: Tensor,
    summed: Tensor,
    scalars_by_choice: Tensor | None,
) -> None:
    """
    Sum rows (rows, hidden_size) by token into summed (tokens, hidden_size), times probabilities if any.

    The last stride of rows is 1; probabilities are (tokens, top_k). Also writes row_scalars (rows,) by choice to
    scalars_by_choice (tokens, top_k).
    """
    if not dest_row.numel():
        return
    _sum_rows_by_token_kernel[(len(dest_row),)](
        rows,
        None if probabilities is None else probabilities.contiguous(),
        None if row_scalars is None else row_scalars.contiguous(),
        dest_row,
        summed,
        scalars_by_choice,
        rows.shape[1],
        rows.stride(0),
        CHOICES=dest_row.shape[1],
        TOGETHER=next_power_of_2(dest_row.shape[1]),
        **choose_row_constants(rows.shape[1]),
    )


def choose_row_constants(width: int, per_warp: int = ELEMENTS_PER_WARP) -> dict[str, Any]:
    """Return how many columns of a row (width,) a program processes at a time, `per_warp` per warp."""
    block = min(max(16, next_power_of_2(width)), TILE)
    return {"BLOCK": block, "num_warps": max(1, min(block // per_warp, 8))}


def choose_tile_constants(top_k: int, width: int) -> dict[str, Any]:
    """Return tile sizes for rows (width,): a token's `top_k` choices, up to a power of 2, by a column block."""
    together = next_power_of_2(top_k)
    block = min(max(16, TILE // together), next_power_of_2(max(width, 1)))
    warps = max(1, min(together * block // ELEMENTS_PER_WARP, 8))
    return {"CHOICES": top_k, "TOGETHER": together, "BLOCK": block, "num_warps": warps}


# fmt: off
@cache_launches("tokens", "count", "num_experts")
def _copy_tokens_zero_unused_kernel(
    x, others, probabilities, dest_row, offsets, rows, row_scalars, products, tokens, count, num_experts, width,
    x_stride, others_stride, WEIGHTED: constexpr, CHOICES: constexpr, TOGETHER: constexpr, BLOCK: constexpr,
):
    # fmt: on
    token = tl.program_id(0).to(tl.int64)
    if token < tokens:
        copy_token_and_dot_others(
            x, others, probabilities, dest_row, rows, row_scalars, products, token, width, x_stride, others_stride,
            WEIGHTED, CHOICES, TOGETHER, BLOCK,
        )  # fmt: skip
    else:
        # The programs after the last token zero the rows from the last expert's end (its offset) on.
        filler = token - tokens
        first = tl.load(offsets + num_experts - 1).to(tl.int64) + filler
        _zero_every_nth_row(rows, row_scalars, first, count.to(tl.int64), tl.num_programs(0) - tokens, width, BLOCK)


# fmt: off
@triton.jit
def copy_token_and_dot_others(
    x, others, probabilities, dest_row, rows, row_scalars, products, token, width, x_stride, others_stride,
    WEIGHTED: constexpr, CHOICES: constexpr, TOGETHER: constexpr, BLOCK: constexpr,
):
    # fmt: on
    choice, column = tl.arange(0, TOGETHER), tl.arange(0, BLOCK)
    row = tl.load(dest_row + token * CHOICES + choice, mask=choice < CHOICES, other=-1).to(tl.int64)
    has_row = row >= 0
    factor = tl.full((TOGETHER,), 1.0, tl.float32)
    if probabilities is not None:
        probability = load_or_zero(probabilities + token * CHOICES + choice, choice < CHOICES)
        if row_scalars is not None:
            tl.store(row_scalars + row, probability, mask=has_row)
        factor = probability.to(tl.float32)
    product = tl.zeros((TOGETHER, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        within = start + column < width
        inside = mask_tile(has_row, within)
        values = load_or_zero(x + token * x_stride + start + column, within)
        spread = tl.broadcast_to(values[None, :], (TOGETHER, BLOCK))
        if WEIGHTED:
            spread = (spread.to(tl.float32) * factor[:, None]).to(rows.dtype.element_ty)
        if others is not None:
            at = others + row[:, None] * others_stride + start + column[None, :]
            product += load_float32(at, inside) * values.to(tl.float32)[None, :]
        tl.store(rows + row[:, None] * width + start + column[None, :], spread, mask=inside)
    if products is not None:
        # In float64, since terms may cancel: there is one reduction per row, however wide it is.
        tl.store(products + token * CHOICES + choice, tl.sum(product.to(tl.float64), 1), mask=choice < CHOICES)


@triton.jit
def _zero_every_nth_row(rows, row_scalars, first, count, step, width, BLOCK: constexpr):
    """Zero every `step`-th row from `first` on."""
    column = tl.arange(0, BLOCK)
    for row in range(first, count, step):
        if row_scalars is not None:
            tl.store(row_scalars + row, 0.0)
        for start in range(0, width, BLOCK):
            zeros = tl.zeros((BLOCK,), rows.dtype.element_ty)
            at = rows + tl.cast(row, tl.int64) * width + start + column
            tl.store(at, zeros, mask=start + column < width)


# fmt: off
@cache_launches()
def _sum_rows_by_token_kernel(
    rows, probabilities, row_scalars, dest_row, summed, scalars_by_choice, width, rows_stride,
    CHOICES: constexpr, TOGETHER: constexpr, BLOCK: constexpr,
):
    # fmt: on
    token = tl.program_id(0).to(tl.int64)
    choice, column = tl.arange(0, TOGETHER), tl.arange(0, BLOCK)
    within = choice < CHOICES
    row = tl.load(dest_row + token * CHOICES + choice, mask=within, other=-1).to(tl.int64)
    if row_scalars is not None:
        scalar = load_or_zero(row_scalars + row, row >= 0)
        tl.store(scalars_by_choice + token * CHOICES + choice, scalar, mask=within)
    for start in range(0, width, BLOCK):
        total = tl.zeros((BLOCK,), tl.float32)
        # One choice at a time: a sum over a tile of rows moves a third of the bytes per second.
        for number in tl.static_range(CHOICES):
            source = tl.load(dest_row + token * CHOICES + number).to(tl.int64)
            end = tl.where(source >= 0, width, 0)
            values = load_or_zero(rows + source * rows_stride + start + column, start + column < end)
            values = values.to(tl.float32)
            if probabilities is not None:
                values *= tl.load(probabilities + token * CHOICES + number).to(tl.float32)
            total += values
        total = total.to(summed.dtype.element_ty)
        tl.store(summed + token * width + start + column, total, mask=start + column < width)


PEER_ENTRIES = 1024
"""Choices by program in `localize_choices` and `limit_routes_and_flag_overflow`."""

PEER_ELEMENTS_PER_WARP = 1024
"""Elements per warp where programs copy or sum whole rows."""


class PeerExchangeTriton:
    """Operations for an exchange between ranks, for float32, bfloat16 and float16."""

    @staticmethod
    def write_tokens_to_slots(values: Sequence[Tensor], own_slots: Sequence[Tensor]) -> None:
        """Write hidden states, and perhaps scalars and choices (tokens, columns), to slots (slots, columns)."""
        hidden, *others = values[0], *(tensor.contiguous() for tensor in values[1:])
        hidden = view_as_rows(hidden) if hidden.numel() else hidden
        slots, width = own_slots[0].shape
        top_k = others[0].shape[1] if others else 0
        scalars, choices = others or (None, None)
        to_scalars, to_choices = own_slots[1:] if others else (None, None)
        _publish_kernel[(slots,)](
            hidden,
            scalars,
            choices,
            own_slots[0],
            to_scalars,
            to_choices,
            len(hidden),
            width,
            hidden.stride(0) if len(hidden) else width,
            CHOICES=top_k,
            TOGETHER=next_power_of_2(max(top_k, 1)),
            **choose_row_constants(width, PEER_ELEMENTS_PER_WARP),
        )

    @staticmethod
    def localize_choices(chosen: PeerTensors, first: int, experts: int) -> Tensor:
        """
        Return the choices of this rank's experts, numbered from 0, int32 (ranks * slots, top_k); other choices are -1.

        This rank has `experts` experts from `first` on. chosen: int32 (slots, top_k) by rank, -1 in unused slots.
        """
        tensors, addresses = chosen
        slots, top_k = tensors[0].shape
        local = tensors[0].new_empty(len(tensors) * slots, top_k)
        if local.numel():
            grid = (cdiv(local.numel(), PEER_ENTRIES),)
            _localize_choices_kernel[grid](
                addresses, local, local.numel(), slots * top_k, first, experts, ENTRIES=PEER_ENTRIES
            )
        return local

    @staticmethod
    def limit_routes_and_flag_overflow(routes: Routes, row_limit: int, peak_rows: Tensor) -> tuple[Routes, Tensor]:
        """Return routes to at most `row_limit` rows, and a flag, float32 (1,), NaN or 0."""
        dest_row, source_choice, offsets = routes
        limited, ends = torch.empty_like(dest_row), torch.empty_like(offsets)
        flag = peak_rows.new_empty(1, dtype=torch.float32)
        grid = (max(1, cdiv(dest_row.numel(), PEER_ENTRIES)),)
        _limit_routes_kernel[grid](
            dest_row,
            offsets,
            limited,
            ends,
            flag,
            peak_rows,
            dest_row.numel(),
            len(offsets),
            row_limit,
            ENTRIES=PEER_ENTRIES,
            EXPERTS=next_power_of_2(len(offsets)),
        )
        return Routes(limited, source_choice[:row_limit], ends), flag

    @staticmethod
    def read_rows_and_scalars(
        tokens: PeerTensors, scalars: PeerTensors | None, routes: Routes
    ) -> tuple[Tensor, Tensor | None]:
        """Return (rows, hidden_size) and (rows,) from ranks' tokens (slots, hidden_size), scalars (slots, top_k)."""
        like, (dest_row, source_choice, _) = tokens[0][0], routes
        check_floats("moe_peers by triton", like)
        rows = like.new_empty(len(source_choice), like.shape[1])
        row_scalars = None if scalars is None else scalars[0][0].new_empty(len(rows))
        if len(rows):
            _read_peer_rows_kernel[(len(dest_row),)](
                tokens[1],
                None if scalars is None else scalars[1],
                dest_row,
                rows,
                row_scalars,
                len(like),
                like.shape[1],
                **choose_tile_constants(dest_row.shape[1], like.shape[1]),
            )
        return rows, row_scalars

    @staticmethod
    def publish_token_sums(
        rows: Tensor, scalars: Tensor | None, dest_row: Tensor, sums: Tensor, by_choice: Tensor | None
    ) -> None:
        """Write rows (rows, hidden_size), scalars (rows,) to sums (tokens, hidden_size), by_choice (tokens, top_k)."""
        check_floats("moe_peers by triton", rows)
        sum_rows_by_token_into(view_as_rows(rows) if rows.numel() else rows, None, scalars, dest_row, sums, by_choice)

    @staticmethod
    def read_token_sums_and_scalars(
        staged: PeerTensors, by_choice: PeerTensors | None, chosen: Tensor, first: int, experts: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return (tokens, hidden_size) and (tokens, top_k), from staged (ranks * slots, hidden_size) by rank."""
        like = staged[0][0]
        total = like.new_empty(len(chosen), like.shape[1])
        choice_scalars = None if by_choice is None else by_choice[0][0].new_empty(chosen.shape)
        if len(chosen):
            top_k = chosen.shape[1]
            _read_peer_sums_kernel[(len(chosen),)](
                staged[1],
                None if by_choice is None else by_choice[1],
                chosen.contiguous(),
                total,
                choice_scalars,
                first,
                experts,
                like.shape[1],
                RANKS=len(staged[0]),
                CHOICES=top_k,
                TOGETHER=next_power_of_2(max(top_k, 1)),
                **choose_row_constants(like.shape[1], PEER_ELEMENTS_PER_WARP),
            )
        return total, choice_scalars


moe_peers_triton = PeerExchangeTriton()


# fmt: off
@cache_launches("tokens")
def _publish_kernel(
    hidden, scalars, choices, to_hidden, to_scalars, to_choices, tokens, width, stride,
    CHOICES: constexpr, TOGETHER: constexpr, BLOCK: constexpr,
):
    # fmt: on
    """Copy a token's hidden state, scalars and choices to this rank's slots; unused slots get no choices."""
    slot, column = tl.program_id(0).to(tl.int64), tl.arange(0, TOGETHER)
    if scalars is not None:
        within, is_used = column < CHOICES, column < tl.where(slot < tokens, CHOICES, 0)
        scalar = load_or_zero(scalars + slot * CHOICES + column, is_used)
        tl.store(to_scalars + slot * CHOICES + column, scalar, mask=within)
        choice = tl.load(choices + slot * CHOICES + column, mask=is_used, other=-1)
        tl.store(to_choices + slot * CHOICES + column, choice.to(tl.int32), mask=within)
    if slot < tokens:
        for start in range(0, width, BLOCK):
            channel = start + tl.arange(0, BLOCK)
            values = tl.load(hidden + slot * stride + channel, mask=channel < width)
            tl.store(to_hidden + slot * width + channel, values, mask=channel < width)


# fmt: off
@cache_launches("count", "row_limit")
def _limit_routes_kernel(
    dest_row, offsets, limited, ends, flag, peak_rows, count, experts, row_limit,
    ENTRIES: constexpr, EXPERTS: constexpr,
):
    # fmt: on
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    row = tl.load(dest_row + entry, mask=entry < count, other=-1)
    tl.store(limited + entry, tl.where(row < row_limit, row, -1), mask=entry < count)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, EXPERTS)
        end = load_or_zero(offsets + expert, expert < experts)
        tl.store(ends + expert, tl.minimum(end, row_limit), mask=expert < experts)
        rows = tl.max(end, 0)
        tl.store(peak_rows, tl.maximum(tl.load(peak_rows), rows))
        tl.store(flag, tl.where(rows > row_limit, float("nan"), 0.0))


# fmt: off
@cache_launches("first")
def _localize_choices_kernel(chosen, local, count, per_rank, first, experts, ENTRIES: constexpr):
    # fmt: on
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < count
    rank = tl.where(inside, entry // per_rank, 0)
    at = tl.load(chosen + rank).to(tl.pointer_type(tl.int32))
    expert = tl.load(at + entry % per_rank, mask=inside, other=-1) - first
    tl.store(local + entry, tl.where((expert >= 0) & (expert < experts), expert, -1), mask=inside)


# fmt: off
@cache_launches()
def _read_peer_rows_kernel(
    tokens, scalars, dest_row, rows, row_scalars, slots, width,
    CHOICES: constexpr, TOGETHER: constexpr, BLOCK: constexpr,
):
    # fmt: on
    """Copy a token from its rank to the rows for its local choices."""
    program, choice = tl.program_id(0).to(tl.int64), tl.arange(0, TOGETHER)
    rank = program // slots
    row = tl.load(dest_row + program * CHOICES + choice, mask=choice < CHOICES, other=-1)
    if tl.max(row, 0) >= 0:
        x = tl.load(tokens + rank).to(tl.pointer_type(rows.dtype.element_ty))
        rank_scalars = None
        if scalars is not None:
            rank_scalars = tl.load(scalars + rank).to(tl.pointer_type(row_scalars.dtype.element_ty))
        copy_token_and_dot_others(
            x, None, rank_scalars, dest_row + rank * slots * CHOICES, rows, row_scalars, None, program - rank * slots,
            width, width, 0, False, CHOICES, TOGETHER, BLOCK,
        )  # fmt: skip


# fmt: off
@cache_launches("first")
def _read_peer_sums_kernel(
    staged, by_choice, chosen, total, choice_scalars, first, experts, width,
    RANKS: constexpr, CHOICES: constexpr, TOGETHER: constexpr, BLOCK: constexpr,
):
    # fmt: on
    """
    Sum a token's staged rows over the ranks with its chosen experts; with `by_choice`, also read its choices' scalars
    from these ranks.
    """
    token, choice = tl.program_id(0).to(tl.int64), tl.arange(0, TOGETHER)
    within = choice < CHOICES
    expert = tl.load(chosen + token * CHOICES + choice, mask=within, other=-1).to(tl.int32)
    rank = tl.where(expert >= 0, expert // experts, -1)
    if by_choice is not None:
        has_rank = within & (rank >= 0)
        at = tl.load(by_choice + tl.where(has_rank, rank, 0)).to(tl.pointer_type(choice_scalars.dtype.element_ty))
        scalar = load_or_zero(at + (first + token) * CHOICES + choice, has_rank)
        tl.store(choice_scalars + token * CHOICES + choice, scalar, mask=within)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        result = tl.zeros((BLOCK,), tl.float32)
        for number in tl.static_range(RANKS):
            within_width = width * tl.max((rank == number).to(tl.int32), 0)  # 0 if the rank has no part
            part = tl.load(staged + number).to(tl.pointer_type(total.dtype.element_ty)) + (first + token) * width
            result += load_float32(part + column, column < within_width)
        tl.store(total + token * width + column, result, mask=column < width)
