"""
Expert parallelism by reading other GPUs' memory, in Triton: one launch per operation in an exchange.

A program processes one token, and reads the token from its rank. Loads from another GPU take longer than local loads;
to hide this there are many programs, and a program loads a whole tile before using it.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.moe import Routes
from drawloom.kernels.moe_peers import PeerTensors
from drawloom.kernels.triton.launch import cache_launches
from drawloom.kernels.triton.moe_permute import (
    choose_row_constants,
    choose_tile_constants,
    copy_token_and_dot_others,
    sum_rows_by_token_into,
)
from drawloom.kernels.triton.primitives import cdiv, check_floats, next_power_of_2, view_as_rows

ENTRIES = 1024
"""Choices by program in `localize_choices` and `limit_routes_and_flag_overflow`."""

ELEMENTS_PER_WARP = 1024
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
            **choose_row_constants(width, ELEMENTS_PER_WARP),
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
            grid = (cdiv(local.numel(), ENTRIES),)
            _localize_choices_kernel[grid](
                addresses, local, local.numel(), slots * top_k, first, experts, ENTRIES=ENTRIES, num_warps=4
            )
        return local

    @staticmethod
    def limit_routes_and_flag_overflow(routes: Routes, row_limit: int, peak_rows: Tensor) -> tuple[Routes, Tensor]:
        """Return routes to at most `row_limit` rows, and a flag, float32 (1,), NaN or 0."""
        dest_row, source_choice, offsets = routes
        limited, ends = torch.empty_like(dest_row), torch.empty_like(offsets)
        flag = peak_rows.new_empty(1, dtype=torch.float32)
        grid = (max(1, cdiv(dest_row.numel(), ENTRIES)),)
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
            ENTRIES=ENTRIES,
            EXPERTS=next_power_of_2(len(offsets)),
            num_warps=4,
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
                enable_fp_fusion=True,
                **choose_row_constants(like.shape[1], ELEMENTS_PER_WARP),
            )
        return total, choice_scalars


TRITON = PeerExchangeTriton()


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["tokens"])
def _publish_kernel(
    hidden, scalars, choices, to_hidden, to_scalars, to_choices, tokens, width, stride,
    CHOICES: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """Copy a token's hidden state, scalars and choices to this rank's slots; unused slots get no choices."""
    slot, column = tl.program_id(0).to(tl.int64), tl.arange(0, TOGETHER)
    if scalars is not None:
        within, is_used = column < CHOICES, column < tl.where(slot < tokens, CHOICES, 0)
        scalar = tl.load(scalars + slot * CHOICES + column, mask=is_used, other=0.0)
        tl.store(to_scalars + slot * CHOICES + column, scalar, mask=within)
        choice = tl.load(choices + slot * CHOICES + column, mask=is_used, other=-1)
        tl.store(to_choices + slot * CHOICES + column, choice.to(tl.int32), mask=within)
    if slot < tokens:
        for start in range(0, width, BLOCK):
            channel = start + tl.arange(0, BLOCK)
            values = tl.load(hidden + slot * stride + channel, mask=channel < width)
            tl.store(to_hidden + slot * width + channel, values, mask=channel < width)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["count", "row_limit"])
def _limit_routes_kernel(
    dest_row, offsets, limited, ends, flag, peak_rows, count, experts, row_limit,
    ENTRIES: tl.constexpr, EXPERTS: tl.constexpr,
):
    # fmt: on
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    row = tl.load(dest_row + entry, mask=entry < count, other=-1)
    tl.store(limited + entry, tl.where(row < row_limit, row, -1), mask=entry < count)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, EXPERTS)
        end = tl.load(offsets + expert, mask=expert < experts, other=0)
        tl.store(ends + expert, tl.minimum(end, row_limit), mask=expert < experts)
        rows = tl.max(end, 0)
        tl.store(peak_rows, tl.maximum(tl.load(peak_rows), rows))
        tl.store(flag, tl.where(rows > row_limit, float("nan"), 0.0))


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["first"])
def _localize_choices_kernel(chosen, local, count, per_rank, first, experts, ENTRIES: tl.constexpr):
    # fmt: on
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < count
    rank = tl.where(inside, entry // per_rank, 0)
    at = tl.load(chosen + rank).to(tl.pointer_type(tl.int32))
    expert = tl.load(at + entry % per_rank, mask=inside, other=-1) - first
    tl.store(local + entry, tl.where((expert >= 0) & (expert < experts), expert, -1), mask=inside)


# fmt: off
@cache_launches
@triton.jit
def _read_peer_rows_kernel(
    tokens, scalars, dest_row, rows, row_scalars, slots, width,
    CHOICES: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
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
@cache_launches
@triton.jit(do_not_specialize=["first"])
def _read_peer_sums_kernel(
    staged, by_choice, chosen, total, choice_scalars, first, experts, width,
    RANKS: tl.constexpr, CHOICES: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
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
        scalar = tl.load(at + (first + token) * CHOICES + choice, mask=has_rank, other=0.0)
        tl.store(choice_scalars + token * CHOICES + choice, scalar, mask=within)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        result = tl.zeros((BLOCK,), tl.float32)
        for number in tl.static_range(RANKS):
            within_width = width * tl.max((rank == number).to(tl.int32), 0)  # 0 if the rank has no part
            part = tl.load(staged + number).to(tl.pointer_type(total.dtype.element_ty)) + (first + token) * width
            result += tl.load(part + column, mask=column < within_width, other=0.0).to(tl.float32)
        tl.store(total + token * width + column, result.to(total.dtype.element_ty), mask=column < width)
