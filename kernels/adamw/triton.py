"""
AdamW in Triton, rounded to the nearest or stochastically: one launch for all weights with the same dtypes.

A table on the device holds the addresses of every weight, its gradient and its state. A second table assigns a weight
and a part of it to every program. Two small tensors on the device hold the values that change from step to step, so a
launch can be captured in a CUDA graph and replayed. Nothing is contracted into fused multiply-adds, and division
and square root are rounded by IEEE 754, so the results are bitwise equal to the eager implementation.

With running means in 8 bits, a program decodes, updates and encodes blocks with 256 elements in a row, each with its
own scale. The nearest code is computed from the number's place in its decade. Only blocks with a number beside a
midpoint, where rounding decides, are compared with the table of midpoints. Roots and quotients have no branches, and
one warp has eight neighbouring elements per thread, so no barrier and no exchange of elements separates its loads.
"""

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from drawloom.kernels.adamw.eager import BLOCK as CODE_BLOCK
from drawloom.kernels.adamw.eager import SMALLEST, ParamState, compute_values_and_midpoints
from drawloom.kernels.triton.primitives import (
    cache_launches,
    cdiv,
    limit_registers,
    load_float32,
    load_or_zero,
    philox,
    round_stochastically,
    split_into_16bit_halves,
    upload,
)

ALIGNMENT = 16
"""Bytes per vectorized load; kernels read other tensors element by element."""

PART = 2**14
"""Elements per program."""

BLOCK = 512
"""Elements per program iteration: 4 per thread, 8 bytes in bfloat16; larger ones lower the occupancy."""

TABLE_COLUMNS = 15
"""
Numbers in a row of the table: addresses of weight, gradient, means, remainder, max_exp_avg_sq and the scales of means,
0 for missing ones; the count of elements, or of blocks with codes; the weight's index among all weights; the noise's
key, first index, row width and row stride; and the weight's row width.
"""

CODE_WARPS = 1
"""Warps per program for codes: with one, no barrier waits for a block's largest number."""

REGISTERS = 64
"""Registers per thread for codes; more leave too few programs to hide the loads."""

PROGRAM_BLOCKS = 32
"""A program's blocks with codes."""


class AdamwTriton:
    """Optimizer step with one launch for each dtype combination; bitwise equal to AdamwEager."""

    def __init__(self, params: Sequence[ParamState], maximize: bool = False) -> None:
        filled = [index for index, param in enumerate(params) if param.weight.numel()]
        kinds = sorted(filled, key=lambda index: _get_launch_group_key(params[index]))
        groups = [list(group) for _, group in groupby(kinds, key=lambda index: _get_launch_group_key(params[index]))]
        self._launches = [
            (indices, _FusedStep([params[index] for index in indices], indices, maximize)) for indices in groups
        ]

    def step(
        self,
        grads: Sequence[Tensor],
        scalars: Tensor,
        counter: int | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Update all weights and their state in place. The arguments are those of AdamwEager.step."""
        for indices, launch in self._launches:
            launch.run([grads[index] for index in indices], *launch.upload_scalars(scalars, counter), found_inf)


def _get_launch_group_key(param: ParamState) -> tuple[str, ...]:
    """Return the dtypes, device and compile-time constants shared by a launch's weights."""
    kind = param.weight.dtype, param.exp_avg.dtype, param.weight.device, param.has_whole_blocks
    return tuple(map(str, (*kind, *_kernel_constants(param).values())))


def _kernel_constants(param: ParamState) -> dict[str, bool]:
    """
    Return the kernel's compile-time constants for a weight.

    They state whether loads are aligned, how elements map to the noise, whether the step divides by max_exp_avg_sq, and
    whether weights are master weights.
    """
    aligned = all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in param.weight_and_state_tensors)
    has_maximum = param.max_exp_avg_sq is not None
    constants = {
        "ALIGNED": aligned,
        "ROWS": not param.is_one_flat_range,
        "PAIRS": param.has_adjacent_noise_pairs,
        "AMSGRAD": has_maximum,
    }
    return constants | {"MASTER": param.remainder is not None}


class _FusedStep:
    """Launch for non-empty weights with equal dtypes and constants, with their address tables."""

    def __init__(self, params: list[ParamState], indices: list[int], maximize: bool) -> None:
        if any(not tensor.is_contiguous() for param in params for tensor in param.weight_and_state_tensors):
            raise ValueError("weights and their state must be contiguous; use AdamwEager for others")
        self._params, self._indices = params, indices
        self._device = params[0].weight.device
        self._constants = _kernel_constants(params[0]) | {"MAXIMIZE": maximize}
        self._has_codes = params[0].has_8bit_moments
        size = PROGRAM_BLOCKS if self._has_codes else PART
        counts = [cdiv(_count_elements_or_blocks(param), size) for param in params]
        parts = [(row, part) for row, count in enumerate(counts) for part in range(count)]
        self._parts = upload(torch.tensor(parts, dtype=torch.int32), self._device)
        weight_decays = torch.tensor([param.weight_decay for param in params], dtype=torch.float32)
        self._weight_decays = upload(weight_decays, self._device)
        # Empty tensors carry the dtypes; the address of a tensor with memory would matter to the launch.
        self._likes = [x.view(-1)[:0] for x in (params[0].weight, params[0].exp_avg)]
        self._addresses: list[int] = []
        self._table = torch.empty(0)

    def upload_scalars(self, scalars: Tensor, counter: int | None) -> tuple[Tensor, Tensor | None]:
        """Return the scalars, float32 (6,) or (all weights, 6), and the counter, int64 (1,), on the device."""
        noise_step = None if counter is None else upload(torch.tensor([counter]), self._device)
        return upload(scalars, self._device), noise_step

    def run(
        self,
        grads: list[Tensor],
        scalars: Tensor,
        counter: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """
        Launch the step with gradients (any shape) in the weights' order, and the tensors from `upload_scalars`.

        The weights do not change if `found_inf` is not 0.
        """
        grads = [_align_gradient(grad) for grad in grads]
        if len({grad.dtype for grad in grads}) > 1:  # rare enough for copies
            grads = [grad.float() for grad in grads]
        addresses = [grad.data_ptr() for grad in grads]
        # Gradients move when they are freed and allocated again; the addresses of other tensors are constant.
        if addresses != self._addresses:
            rows = [_make_table_row(*fields) for fields in zip(self._params, addresses, self._indices, strict=True)]
            self._table, self._addresses = upload(torch.tensor(rows), self._device), addresses
        tables = self._table, self._parts, self._weight_decays
        numbers = scalars, 0 if scalars.ndim == 1 else scalars.stride(0), counter, found_inf
        likes = self._likes[0], grads[0].view(-1)[:0]
        arguments = *tables, *numbers, *likes
        if self._has_codes:
            self._launch_with_codes(arguments)
            return
        _adamw_kernel[(len(self._parts),)](
            *arguments,
            self._likes[1],
            **self._constants,
            PART=PART,
            BLOCK=BLOCK,
            TABLE_COLUMNS=TABLE_COLUMNS,
            enable_fp_fusion=False,
        )

    def _launch_with_codes(self, arguments: tuple[Any, ...]) -> None:
        whole = self._params[0].has_whole_blocks and self._constants["ALIGNED"]
        _adamw_8bit_kernel[(len(self._parts),)](
            *arguments,
            _upload_code_values_and_midpoints(self._device),
            ROWS=self._constants["ROWS"],
            PAIRS=whole and self._constants["PAIRS"],
            WHOLE=whole,
            MASTER=self._constants["MASTER"],
            MAXIMIZE=self._constants["MAXIMIZE"],
            BLOCK=CODE_BLOCK,
            PROGRAM_BLOCKS=PROGRAM_BLOCKS,
            TABLE_COLUMNS=TABLE_COLUMNS,
            SMALLEST=SMALLEST,
            num_warps=CODE_WARPS,
            **limit_registers(REGISTERS),
            enable_fp_fusion=False,
        )


def _make_table_row(param: ParamState, grad: int, index: int) -> list[int]:
    """Return a weight's table row."""
    means = param.exp_avg, param.exp_avg_sq
    state = *means, param.remainder, param.max_exp_avg_sq, param.exp_avg_scale, param.exp_avg_sq_scale
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in state]
    noise = param.key, param.first_index, param.row_width, param.row_stride
    width = param.weight.shape[-1:].numel()
    return [param.weight.data_ptr(), grad, *addresses, _count_elements_or_blocks(param), index, *noise, width]


def _count_elements_or_blocks(param: ParamState) -> int:
    """Return a weight's elements, or with codes its blocks."""
    return (param.weight if param.exp_avg_scale is None else param.exp_avg_scale).numel()


@cache
def _upload_code_values_and_midpoints(device: torch.device) -> Tensor:
    """Return values and midpoints of both maps, float32 (4 * 256,), with infinity after the midpoints."""
    parts = [part for signed in (True, False) for part in compute_values_and_midpoints(signed, torch.device("cpu"))]
    padded = [torch.cat([part, torch.full((256 - len(part),), torch.inf)]) for part in parts]
    return upload(torch.cat(padded), device)


def _align_gradient(grad: Tensor) -> Tensor:
    """Return the gradient, contiguous and aligned for vectorized loads."""
    grad = grad.contiguous()
    return grad if grad.data_ptr() % ALIGNMENT == 0 else grad.clone()


# fmt: off
@cache_launches()
def _adamw_kernel(
    table, parts, decays, scalars, scalars_stride, counter, found_inf, weight_like, grad_like, exp_avg_like,
    ALIGNED: constexpr, ROWS: constexpr, PAIRS: constexpr, AMSGRAD: constexpr, MASTER: constexpr,
    MAXIMIZE: constexpr, PART: constexpr, BLOCK: constexpr, TABLE_COLUMNS: constexpr,
):
    # fmt: on
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(parts + 2 * program).to(tl.int64)
    start = tl.load(parts + 2 * program + 1).to(tl.int64) * PART
    table += row * TABLE_COLUMNS
    weight = tl.load(table).to(weight_like.dtype)
    grad = tl.load(table + 1).to(grad_like.dtype)
    exp_avg = tl.load(table + 2).to(exp_avg_like.dtype)
    exp_avg_sq = tl.load(table + 3).to(exp_avg_like.dtype)
    if ALIGNED:
        weight, grad = tl.multiple_of(weight, 16), tl.multiple_of(grad, 16)
        exp_avg, exp_avg_sq = tl.multiple_of(exp_avg, 16), tl.multiple_of(exp_avg_sq, 16)
    remainder = tl.load(table + 4).to(tl.pointer_type(tl.int16))
    max_sq = tl.load(table + 5).to(exp_avg_like.dtype)
    if ALIGNED:
        remainder, max_sq = tl.multiple_of(remainder, 16), tl.multiple_of(max_sq, 16)
    count, key, first, width, stride = _load_count_and_noise(table, found_inf)
    step = _load_step_scalars(scalars + tl.load(table + 9) * scalars_stride, decays + row)
    noise_step = None if counter is None else tl.load(counter)
    tensors = weight, grad, exp_avg, exp_avg_sq, max_sq, remainder
    # fmt: off
    for block in range(0, tl.minimum(PART, count - start), BLOCK):
        element = start + block + tl.arange(0, BLOCK)
        if PAIRS:  # one draw for two neighbouring elements
            index = _parameter_index(start + block + 2 * tl.arange(0, BLOCK // 2), first, width, stride, ROWS)
        else:
            index = _parameter_index(element, first, width, stride, ROWS)
        if start + block + BLOCK <= count:
            _update_elements(tensors, element, None, key, index, noise_step, step, PAIRS, AMSGRAD, MASTER, MAXIMIZE)
        else:
            _update_elements(tensors, element, element < count, key, index, noise_step, step, PAIRS, AMSGRAD, MASTER,
                    MAXIMIZE)


@triton.jit
def _load_count_and_noise(table, found_inf):
    """Return a weight's count, 0 if there is an infinity, and its noise's key, first index, row width and stride."""
    count = tl.load(table + 8)
    if found_inf is not None:
        count = tl.where(tl.load(found_inf) == 0, count, 0)
    return count, tl.load(table + 10), tl.load(table + 11), tl.load(table + 12), tl.load(table + 13)


@triton.jit
def _load_step_scalars(scalars, decay):
    """Return the step's scalars; in place of the learning rate, its product with the weight decay."""
    lr, one_minus_beta1, one_minus_beta2 = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    corrected_lr, sq_correction, eps = tl.load(scalars + 3), tl.load(scalars + 4), tl.load(scalars + 5)
    return lr * tl.load(decay), one_minus_beta1, one_minus_beta2, corrected_lr, sq_correction, eps


@triton.jit
def _load_weight(weight, remainder, element, mask, MASTER: constexpr):
    """Load a weight in float32; with MASTER, put its halves together."""
    if MASTER:
        high = tl.load(weight + element, mask=mask).to(tl.int16, bitcast=True).to(tl.int32)
        low = tl.load(remainder + element, mask=mask).to(tl.int32)
        value = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        value = tl.load(weight + element, mask=mask).to(tl.float32)
    return value


@triton.jit
def _store_split_weight(weight, remainder, element, mask, new):
    """Store the nearest bfloat16 number, and the rest as 16 bits."""
    bits = new.to(tl.int32, bitcast=True)
    high = tl.where(new != new, bits >> 16 | 0x40, bits + 0x8000 >> 16)
    tl.store(weight + element, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    tl.store(remainder + element, (bits - (high << 16)).to(tl.int16), mask=mask)


@triton.jit
def _parameter_index(element, first, width, stride, ROWS: constexpr):
    """Return the indices in the whole parameter for its part's elements, the weight."""
    if ROWS:
        element = element // width * stride + element % width
    return first + element


@triton.jit
def _update_elements(
    tensors, element, mask, key, index, counter, step, PAIRS: constexpr, AMSGRAD: constexpr,
    MASTER: constexpr, MAXIMIZE: constexpr,
):
    # fmt: on
    """Update elements by AdamW, with noise for the parameter indices `index`, of all elements or only the even ones."""
    weight, grad, exp_avg, exp_avg_sq, max_sq, remainder = tensors
    lr_decay, one_minus_beta1, one_minus_beta2, corrected_lr, sq_correction, eps = step
    old = _load_weight(weight, remainder, element, mask, MASTER)
    g = tl.load(grad + element, mask=mask).to(tl.float32)
    m = tl.load(exp_avg + element, mask=mask).to(tl.float32)
    s = tl.load(exp_avg_sq + element, mask=mask).to(tl.float32)
    if MAXIMIZE:
        g = -g
    m = m + (g - m) * one_minus_beta1
    s = s + (g * g - s) * one_minus_beta2
    old = old - old * lr_decay
    divisor = s
    if AMSGRAD:
        maximum = tl.load(max_sq + element, mask=mask).to(tl.float32)
        divisor = tl.maximum(maximum, s, propagate_nan=tl.PropagateNan.ALL)
    new = old - tl.div_rn(m * corrected_lr, tl.sqrt_rn(divisor) * sq_correction + eps)
    if counter is not None:
        for_weight, for_mean, for_square, _ = philox(key, index >> 1, counter)
        if not MASTER:
            new = _round_stochastically_if_bfloat16(new, for_weight, index, weight, PAIRS)
        m = _round_stochastically_if_bfloat16(m, for_mean, index, exp_avg, PAIRS)
        s = _round_stochastically_if_bfloat16(s, for_square, index, exp_avg_sq, PAIRS)
    if AMSGRAD:  # both values are already in the stored dtype, so the maximum needs no rounding
        maximum = tl.maximum(maximum, s.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
        tl.store(max_sq + element, maximum, mask=mask)
    # These casts round float32 values without noise to the nearest.
    if MASTER:
        _store_split_weight(weight, remainder, element, mask, new)
    else:
        tl.store(weight + element, new, mask=mask)
    tl.store(exp_avg + element, m, mask=mask)
    tl.store(exp_avg_sq + element, s, mask=mask)


@triton.jit
def _round_stochastically_if_bfloat16(x, word, index, pointer, PAIRS: constexpr):
    """Round x stochastically with halves of the random words if the pointer is to bfloat16, else return it."""
    if pointer.dtype.element_ty == tl.bfloat16:
        x = _round_by_half_of_word(x, word, index, PAIRS)
    return x


@triton.jit
def _round_by_half_of_word(x, word, index, PAIRS: constexpr):
    """Round x to bfloat16 stochastically, by its elements' indices, or for pairs by the even ones."""
    noise = split_into_16bit_halves(word) if PAIRS else tl.where((index & 1) > 0, word >> 16, word & 0xFFFF)
    return round_stochastically(x, noise)


# fmt: off
@cache_launches()
def _adamw_8bit_kernel(
    table, parts, decays, scalars, scalars_stride, counter, found_inf, weight_like, grad_like, maps,
    ROWS: constexpr, PAIRS: constexpr, WHOLE: constexpr, MASTER: constexpr,
    MAXIMIZE: constexpr, BLOCK: constexpr, PROGRAM_BLOCKS: constexpr, TABLE_COLUMNS: constexpr,
    SMALLEST: constexpr,
):
    # fmt: on
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(parts + 2 * program).to(tl.int64)
    begin = tl.load(parts + 2 * program + 1).to(tl.int64) * PROGRAM_BLOCKS
    table += row * TABLE_COLUMNS
    weight, grad = tl.load(table).to(weight_like.dtype), tl.load(table + 1).to(grad_like.dtype)
    mean = tl.load(table + 2).to(tl.pointer_type(tl.uint8))
    square = tl.load(table + 3).to(tl.pointer_type(tl.uint8))
    remainder = tl.load(table + 4).to(tl.pointer_type(tl.int16))
    mean_scale = tl.load(table + 6).to(tl.pointer_type(tl.float32))
    square_scale = tl.load(table + 7).to(tl.pointer_type(tl.float32))
    if WHOLE:
        weight, grad = tl.multiple_of(weight, 16), tl.multiple_of(grad, 16)
        mean, square = tl.multiple_of(mean, 16), tl.multiple_of(square, 16)
        remainder = tl.multiple_of(remainder, 16)
    blocks, key, first, noise_width, noise_stride = _load_count_and_noise(table, found_inf)
    width = tl.load(table + 14)
    by_row = (width + BLOCK - 1) // BLOCK
    step = _load_step_scalars(scalars + tl.load(table + 9) * scalars_stride, decays + row)
    lr_decay, one_minus_beta1, one_minus_beta2, corrected_lr, sq_correction, eps = step
    noise_step = None if counter is None else tl.load(counter)
    for block in range(begin, tl.minimum(begin + PROGRAM_BLOCKS, blocks)):
        if WHOLE:  # blocks follow one another, without a rest at the end of a row
            start = block * BLOCK
            mask = None
        else:
            start = (block // by_row) * width + (block % by_row) * BLOCK
            mask = (block % by_row) * BLOCK + tl.arange(0, BLOCK) < width
        element = start + tl.arange(0, BLOCK)
        old = _load_weight(weight, remainder, element, mask, MASTER)
        g = load_float32(grad + element, mask)
        if MAXIMIZE:
            g = -g
        m = tl.load(maps + load_or_zero(mean + element, mask).to(tl.int32)) * tl.load(mean_scale + block)
        s = tl.load(maps + 512 + load_or_zero(square + element, mask).to(tl.int32)) * tl.load(square_scale + block)
        m = m + (g - m) * one_minus_beta1
        s = s + (g * g - s) * one_minus_beta2
        greatest = _encode_and_store_moments(m, mean, mean_scale, maps + 256, element, block, mask, True, SMALLEST)
        greatest_square = _encode_and_store_moments(
            s, square, square_scale, maps + 768, element, block, mask, False, SMALLEST
        )
        old = old - old * lr_decay
        is_usual = (eps > 1e-16) & (sq_correction < 1e3)
        if is_usual & (greatest * corrected_lr < eps * 1e18) & (greatest_square < 1e9):  # not if one is undefined
            new = _subtract_usual_quotient(old, m, s, corrected_lr, sq_correction, eps)
        else:
            new = old - tl.div_rn(m * corrected_lr, tl.sqrt_rn(s) * sq_correction + eps)
        if MASTER:
            _store_split_weight(weight, remainder, element, mask, new)
        else:
            if counter is not None and weight.dtype.element_ty == tl.bfloat16:
                index = element
                if PAIRS:  # one draw for two neighbouring elements
                    pair = start // 2 + tl.arange(0, BLOCK // 2)
                    draw = _parameter_index(pair, first // 2, noise_width // 2, noise_stride // 2, ROWS)
                else:
                    index = _parameter_index(element, first, noise_width, noise_stride, ROWS)
                    draw = index >> 1
                word, _, _, _ = philox(key, draw, noise_step)
                new = _round_by_half_of_word(new, word, index, PAIRS)
            tl.store(weight + element, new, mask=mask)


@triton.jit
def _subtract_usual_quotient(old, m, s, corrected_lr, sq_correction, eps):
    """
    Return old - m * corrected_lr / (sqrt(s) * sq_correction + eps), with root and quotient rounded by IEEE 754.

    Newton's steps, without the branches for numbers too small or too large for them: factors 2^n keep their residuals
    normal, and 0 has the root 2^-98, which is lost beside eps. Square, root and divisor are negative, since a residual
    subtracts a product.
    """
    square = tl.fma(s, -(2.0**96), -(2.0**-100))
    inverse = tl.math.rsqrt(tl.abs(square))
    root = square * inverse
    root = tl.fma(tl.fma(root, root, square), inverse * 0.5, root)
    divisor = root * (sq_correction * 2.0**-48) - eps
    inverse = tl.math.rsqrt(tl.abs(divisor))
    inverse = inverse * inverse
    inverse = tl.fma(tl.fma(divisor, inverse, 1.0), inverse, inverse)
    dividend = m * corrected_lr * 2.0**64
    quotient = dividend * inverse
    for _ in tl.static_range(2):
        quotient = tl.fma(tl.fma(divisor, quotient, dividend), inverse, quotient)
    return tl.fma(quotient, -(2.0**-64), old)


@triton.jit
def _encode_and_store_moments(
    numbers, codes, scales, midpoints, element, block, mask, SIGNED: constexpr, SMALLEST: constexpr
):
    """Store the nearest codes, and the largest magnitude as their scale; return it."""
    if mask is not None:
        numbers = tl.where(mask, numbers, 0.0)
    # Magnitudes ascend as integers do, and an undefined one is above all, as in torch.
    scale = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0).to(tl.float32, bitcast=True)
    smallest = tl.full((), SMALLEST, tl.float32)  # a number below float32's normal ones would be float64
    divisor = tl.maximum(scale, smallest, propagate_nan=tl.PropagateNan.ALL)
    inverse = 1.0 / divisor
    inverse = tl.fma(tl.fma(-divisor, inverse, 1.0), inverse, inverse)
    code, doubt = _compute_code(numbers * inverse, SIGNED)
    doubt = tl.max(doubt.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)
    # The inverse of a number beyond 1e37 is not a normal one.
    if (doubt > (0.49998 if SIGNED else 0.49996)) | (scale > 1e37) | (scale != scale):
        relative = tl.div_rn(numbers, tl.broadcast_to(divisor, numbers.shape))
        is_defined = relative == relative
        code, _ = _compute_code(tl.where(is_defined, relative, 0.0), SIGNED)
        code &= 255
        # The code is the count of midpoints below the number; after the 255 midpoints comes infinity.
        above = tl.load(midpoints + code)
        below = tl.load(midpoints + code - 1, mask=code > 0, other=float("-inf"))
        code = code + (relative > above).to(tl.int32) - (relative <= below).to(tl.int32)
        code = tl.where(is_defined, code, 255)  # the place of NaN in torch's order
    tl.store(codes + element, code.to(tl.uint8), mask=mask)
    tl.store(scales + block, scale)
    return scale


@triton.jit
def _compute_code(relative, SIGNED: constexpr):
    """
    Return the nearest code, in the lowest 8 bits, to a number from -1 to 1, and a doubt.

    The number's relative error is at most 1.2e-7. The code is certain if the doubt is below 0.49998, or 0.49996 without
    signs.

    A rank, how many midpoints are below a magnitude, is the sum of a ramp per decade: a GPU multiplies, adds and limits
    to 0 to 1 in one operation. Codes divide a decade evenly, and a decade has twice as many as the one before. So
    midpoints are whole numbers, but a decade's first one, a power of two, is at a fifth. The sum is one half less, so
    it is rounded to the rank.
    """
    codes: constexpr = 1.0 if SIGNED else 2.0
    count: constexpr = 64.0 * codes
    first: constexpr = 2.75e-7 if SIGNED else 1.625e-7
    slope: constexpr = codes * 0.8 / 7.75e-7
    least: constexpr = codes + 0.2 - slope * first
    size = tl.abs(relative)
    rank = tl.fma(_ramp(size, slope / (2 * codes - least), 0.0), 2 * codes - least, least - 0.5)
    for decade in tl.static_range(1, 6):
        rank = tl.fma(_ramp(size, 10.0 ** (6 - decade) / 0.9, -1 / 9), codes * 2.0**decade, rank)
    rank = tl.fma(_ramp(size, count / (count - 0.4) / 0.9, -count / (count - 0.4) / 9), count - 0.4, rank)
    rank = tl.fma(_ramp(relative, count / 0.9, 1 - count / 0.9), 0.8, rank)  # 1 alone has no negative twin
    nearest = (rank + 12582912.0) - 12582912.0
    distance = rank - nearest
    beyond = distance + 0.3
    is_power_of_2 = (nearest.to(tl.int32, bitcast=True) & 0x7FFFFF) == 0
    nearest = tl.where(is_power_of_2 & (beyond < 0), nearest - 1, nearest)
    if SIGNED:
        sign = (relative.to(tl.int32, bitcast=True) & -(2**31)) | 0x3F800000
        code = tl.fma(nearest, sign.to(tl.float32, bitcast=True), 12582912.0 + 127)
    else:
        code = nearest + (12582912.0 - 1)
    return code.to(tl.int32, bitcast=True), tl.maximum(tl.abs(distance), 0.5 - tl.abs(beyond))


@triton.jit
def _ramp(x, slope, offset):
    """Return slope * x + offset, limited to 0 to 1."""
    return tl.clamp(tl.fma(x, slope, offset), 0.0, 1.0)
