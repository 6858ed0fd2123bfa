"""
AdamW in Triton with running means of 8 bits: one launch for all weights with the same dtypes.

A program decodes, updates and encodes blocks of 256 elements in a row, each with its own scale. The nearest code is
computed from the number's place in its decade. Only blocks with a number beside a midpoint, where rounding decides, are
compared with the table of midpoints, so results are bitwise equal to the eager implementation.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.adamw import ParamState
from drawloom.kernels.dynamic_map import BLOCK, SMALLEST, compute_values_and_midpoints
from drawloom.kernels.triton.gradient_factors import (
    ALIGNMENT,
    align_gradient,
    cast_and_scale_if_mixed_dtypes,
    multiply_by_factors,
)
from drawloom.kernels.triton.launch import cache_launches, limit_registers
from drawloom.kernels.triton.primitives import philox, round_stochastically, split_into_16bit_halves, upload

TILE = 1
"""Blocks per iteration of a program."""

WARPS = 1
"""Warps per program: with one, no barrier waits for a block's largest number."""

REGISTERS = 64
"""Registers per thread; more leave too few programs to hide the loads."""

PROGRAM_BLOCKS = 32
"""Blocks of a program."""

TABLE_COLUMNS = 14
"""
Numbers in a row of the table: the addresses of weight, gradient, means, their scales and the remainder, or 0; the count
of blocks, the weight's index, the noise's key, first index, row width and row stride, and the weight's row width.
"""


@cache
def _upload_code_values_and_midpoints(device: torch.device) -> Tensor:
    """Return values and midpoints of both maps, float32 (4 * 256,), with infinity after the midpoints."""
    parts = [part for signed in (True, False) for part in compute_values_and_midpoints(signed, torch.device("cpu"))]
    padded = [torch.cat([part, torch.full((256 - len(part),), torch.inf)]) for part in parts]
    return upload(torch.cat(padded), device)


class Fused8bitStep:
    """Launch for non-empty weights with equal dtypes and constants, like `_FusedStep` in adamw.py."""

    def __init__(self, params: list[ParamState], indices: list[int], maximize: bool) -> None:
        if any(not tensor.is_contiguous() for param in params for tensor in param.weight_and_state_tensors):
            raise ValueError("weights and their state must be contiguous; use AdamwEager for others")
        self._params, self._indices, self._maximize = params, indices, maximize
        self._device = params[0].weight.device
        addresses = [tensor.data_ptr() for tensor in params[0].weight_and_state_tensors]
        is_aligned = all(address % ALIGNMENT == 0 for address in addresses)
        self._has_whole_blocks = params[0].has_whole_blocks and is_aligned
        parts = [
            (row, first)
            for row, p in enumerate(params)
            for first in range(0, _count_scales_per_moment(p), PROGRAM_BLOCKS)
        ]
        self._parts = upload(torch.tensor(parts, dtype=torch.int32), self._device)
        decays = torch.tensor([param.weight_decay for param in params], dtype=torch.float32)
        self._weight_decays = upload(decays, self._device)
        self._weight_like = params[0].weight.view(-1)[:0]
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
        factors: Tensor | None = None,
    ) -> None:
        """
        Launch the step with gradients (any shape) in the weights' order, and the tensors from `upload_scalars`.

        `factors`, float32 (factors,), multiply the gradients.
        """
        grads, factors = cast_and_scale_if_mixed_dtypes([align_gradient(grad) for grad in grads], factors)
        addresses = [grad.data_ptr() for grad in grads]
        if addresses != self._addresses:
            rows = [_make_table_row(*fields) for fields in zip(self._params, addresses, self._indices, strict=True)]
            self._table, self._addresses = upload(torch.tensor(rows), self._device), addresses
        _adamw_8bit_kernel[(len(self._parts),)](
            self._table,
            self._parts,
            self._weight_decays,
            _upload_code_values_and_midpoints(self._device),
            scalars,
            0 if scalars.ndim == 1 else scalars.stride(0),
            counter,
            found_inf,
            factors,
            self._weight_like,
            grads[0].view(-1)[:0],
            FACTORS=0 if factors is None else len(factors),
            ROWS=not self._params[0].is_one_flat_range,
            PAIRS=self._has_whole_blocks and self._params[0].has_adjacent_noise_pairs,
            WHOLE=self._has_whole_blocks,
            MASTER=self._params[0].remainder is not None,
            MAXIMIZE=self._maximize,
            BLOCK=BLOCK,
            TILE=TILE,
            PROGRAM_BLOCKS=PROGRAM_BLOCKS,
            TABLE_COLUMNS=TABLE_COLUMNS,
            SMALLEST=SMALLEST,
            num_warps=WARPS,
            **limit_registers(REGISTERS),
            enable_fp_fusion=False,
        )


def _count_scales_per_moment(param: ParamState) -> int:
    """Return how many scales a mean has; 0 without codes."""
    return 0 if param.exp_avg_scale is None else param.exp_avg_scale.numel()


def _make_table_row(param: ParamState, grad: int, index: int) -> list[int]:
    """Return a weight's table row: addresses, scale count, index, noise parameters and row width."""
    weight, mean, square, *others = (tensor.data_ptr() for tensor in param.weight_and_state_tensors)
    *remainder, mean_scale, square_scale = others
    addresses = [weight, grad, mean, square, mean_scale, square_scale, *(remainder or [0])]
    noise = [param.key, param.first, param.width, param.stride]
    return [*addresses, _count_scales_per_moment(param), index, *noise, param.weight.shape[-1]]


# fmt: off
@cache_launches
@triton.jit
def _adamw_8bit_kernel(
    table, parts, decays, maps, scalars, scalars_stride, counter, found_inf, factors, weight_like, grad_like,
    FACTORS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr, MASTER: tl.constexpr,
    MAXIMIZE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PROGRAM_BLOCKS: tl.constexpr,
    TABLE_COLUMNS: tl.constexpr, SMALLEST: tl.constexpr,
):
    # fmt: on
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(parts + 2 * program).to(tl.int64)
    begin = tl.load(parts + 2 * program + 1).to(tl.int64)
    table += row * TABLE_COLUMNS
    weight, grad = tl.load(table).to(weight_like.dtype), tl.load(table + 1).to(grad_like.dtype)
    mean = tl.load(table + 2).to(tl.pointer_type(tl.uint8))
    square = tl.load(table + 3).to(tl.pointer_type(tl.uint8))
    mean_scale = tl.load(table + 4).to(tl.pointer_type(tl.float32))
    square_scale = tl.load(table + 5).to(tl.pointer_type(tl.float32))
    remainder = tl.load(table + 6).to(tl.pointer_type(tl.int16))
    if WHOLE:
        weight, grad = tl.multiple_of(weight, 16), tl.multiple_of(grad, 16)
        mean, square = tl.multiple_of(mean, 16), tl.multiple_of(square, 16)
        remainder = tl.multiple_of(remainder, 16)
    blocks = tl.load(table + 7)
    if found_inf is not None:
        blocks = tl.where(tl.load(found_inf) == 0, blocks, 0)
    scalars += tl.load(table + 8) * scalars_stride
    key, first = tl.load(table + 9), tl.load(table + 10)
    noise_width, noise_stride, width = tl.load(table + 11), tl.load(table + 12), tl.load(table + 13)
    by_row = (width + BLOCK - 1) // BLOCK
    lr, one_minus_beta1, one_minus_beta2 = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    corrected_lr, sq_correction, eps = tl.load(scalars + 3), tl.load(scalars + 4), tl.load(scalars + 5)
    lr_decay = lr * tl.load(decays + row)
    noise_step = None if counter is None else tl.load(counter)
    for offset in range(0, tl.minimum(PROGRAM_BLOCKS, blocks - begin), TILE):
        block = begin + offset + tl.arange(0, TILE)
        is_block = block < blocks
        if WHOLE:  # blocks follow one another, without a rest at the end of a row
            start = block * BLOCK
            mask = is_block[:, None] if TILE > 1 else None
        else:
            start = (block // by_row) * width + (block % by_row) * BLOCK
            mask = ((block % by_row)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :] < width) & is_block[:, None]
        element = start[:, None] + tl.arange(0, BLOCK)[None, :]
        if MASTER:
            high = tl.load(weight + element, mask=mask).to(tl.int16, bitcast=True).to(tl.int32)
            low = tl.load(remainder + element, mask=mask).to(tl.int32)
            old = ((high << 16) + low).to(tl.float32, bitcast=True)
        else:
            old = tl.load(weight + element, mask=mask).to(tl.float32)
        g = multiply_by_factors(_load_or_zero(grad + element, mask), factors, FACTORS)
        if MAXIMIZE:
            g = -g
        m = _load_and_decode_moments(mean, mean_scale, maps, element, block, mask, is_block)
        s = _load_and_decode_moments(square, square_scale, maps + 512, element, block, mask, is_block)
        m = m + (g - m) * one_minus_beta1
        s = s + (g * g - s) * one_minus_beta2
        old = old - old * lr_decay
        new = old - tl.div_rn(m * corrected_lr, tl.sqrt_rn(s) * sq_correction + eps)
        if MASTER:
            bits = new.to(tl.int32, bitcast=True)
            high = tl.where(new != new, bits >> 16 | 0x40, bits + 0x8000 >> 16)
            tl.store(weight + element, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
            tl.store(remainder + element, (bits - (high << 16)).to(tl.int16), mask=mask)
        else:
            if counter is not None and weight.dtype.element_ty == tl.bfloat16:
                index = element
                if PAIRS:  # one draw for two neighbouring elements
                    index = start[:, None] + 2 * tl.arange(0, BLOCK // 2)[None, :]
                if ROWS:
                    index = index // noise_width * noise_stride + index % noise_width
                new = _round_stochastically(new, key, first + index, noise_step, PAIRS)
            tl.store(weight + element, new.to(weight.dtype.element_ty), mask=mask)
        _encode_and_store_moments(m, mean, mean_scale, maps + 256, element, block, mask, is_block, True, SMALLEST)
        _encode_and_store_moments(s, square, square_scale, maps + 768, element, block, mask, is_block, False, SMALLEST)


@triton.jit
def _load_or_zero(pointers, mask):
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0)


@triton.jit
def _round_stochastically(x, key, index, counter, PAIRS: tl.constexpr):
    """Round x to bfloat16 stochastically, by its elements' indices, or for pairs by the even ones."""
    word, _, _, _ = philox(key, index >> 1, counter)
    noise = split_into_16bit_halves(word) if PAIRS else tl.where((index & 1) > 0, word >> 16, word & 0xFFFF)
    return round_stochastically(x, noise)


@triton.jit
def _load_and_decode_moments(codes, scales, values, element, block, mask, is_block):
    """Decode numbers; 0 outside the mask."""
    scale = tl.load(scales + block, mask=is_block, other=0.0)
    numbers = tl.load(values + _load_or_zero(codes + element, mask).to(tl.int32)) * scale[:, None]
    if mask is not None:
        numbers = tl.where(mask, numbers, 0.0)
    return numbers


@triton.jit
def _encode_and_store_moments(
    numbers, codes, scales, midpoints, element, block, mask, is_block, SIGNED: tl.constexpr, SMALLEST: tl.constexpr
):
    """Store the nearest codes, and the largest magnitudes as scales."""
    # An undefined number makes the scale undefined, as in torch.
    magnitude = tl.abs(numbers) if mask is None else tl.where(mask, tl.abs(numbers), 0.0)
    undefined = tl.max(tl.where(magnitude != magnitude, 1, 0), 1)
    scale = tl.max(tl.where(magnitude != magnitude, 0.0, magnitude), 1)
    scale = tl.where(undefined > 0, float("nan"), scale)
    smallest = tl.full(scale.shape, SMALLEST, tl.float32)  # a number below float32's normal ones would be float64
    divisor = tl.maximum(scale, smallest, propagate_nan=tl.PropagateNan.ALL)
    code, margin = _compute_code(numbers * (1.0 / divisor)[:, None], SIGNED)
    if mask is not None:
        margin = tl.where(mask, margin, 1.0)
    # The inverse of a number beyond 1e37 is not a normal one.
    is_certain = (tl.min(margin, 1) > 0) & (scale < 1e37)
    if tl.min(is_certain.to(tl.int32), 0) == 0:
        relative = tl.div_rn(numbers, tl.broadcast_to(divisor[:, None], numbers.shape))
        is_defined = relative == relative
        code, _ = _compute_code(tl.where(is_defined, relative, 0.0), SIGNED)
        # The code is the count of midpoints below the number; after the 255 midpoints comes infinity.
        above = tl.load(midpoints + code)
        below = tl.load(midpoints + code - 1, mask=code > 0, other=float("-inf"))
        code = code + (relative > above).to(tl.int32) - (relative <= below).to(tl.int32)
        code = tl.where(is_defined, code, 255)  # the place of NaN in torch's order
    tl.store(codes + element, code.to(tl.uint8), mask=mask)
    tl.store(scales + block, scale, mask=is_block)


@triton.jit
def _compute_code(relative, SIGNED: tl.constexpr):
    """
    Return the nearest code to a number from -1 to 1, known to 3e-7 of it, and a margin: above 0 if the code is certain.

    Codes divide a decade evenly, and each decade has twice as many as the one before. In units of a code, midpoints are
    whole numbers, but the first one of a decade is at a fifth. So a decade's logarithm need not be exact: at a power of
    ten both decades have one code. Numbers are rounded, and become integers and back, in the lower bits of 2^23, which
    is faster than conversions.
    """
    codes: tl.constexpr = 1.0 if SIGNED else 2.0
    first_of_all: tl.constexpr = 0.175 / 0.9 if SIGNED else 0.125 / 0.9
    last_of_all: tl.constexpr = 64 * codes - 0.25
    size = tl.abs(relative)
    bits = size.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) + 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + 127.0)
    mantissa = (bits & 0x7FFFFF | 0x3F800000).to(tl.float32, bitcast=True)
    logarithm = tl.fma(tl.fma(mantissa, -1 / 3, 2.0), mantissa, exponent)  # of two, and 5 / 3 more, known to 0.01
    decade = tl.minimum(tl.maximum(tl.fma(logarithm, 0.30103, 6.5 - 5 / 3 * 0.30103), 0.0), 6.0) + 8388608.0
    bits = decade.to(tl.int32, bitcast=True) - 0x4B000000
    decade -= 8388608.0
    count = (bits + (127 if SIGNED else 128) << 23).to(tl.float32, bitcast=True)
    # 5^-decade, with the power of 4 apart, so that the exponent has few bits to lose.
    units = tl.exp2(decade * -0.32192809489) * (127 - 2 * bits << 23).to(tl.float32, bitcast=True)
    position = tl.fma(size, units * (1e6 * codes / 0.9), count * (-0.1 / 0.9))
    first = tl.where(bits == 0, first_of_all, 0.2)
    nearest = tl.minimum((position + 12582912.0) - 12582912.0, count - 1.0)
    floor = tl.maximum(nearest - tl.where(nearest > position, 1.0, 0.0), 0.0)
    rank = count + floor - tl.where(position < first, 1.0, 0.0)
    rank = (rank + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    distance = tl.minimum(tl.abs(position - nearest), tl.abs(position - first))
    margin = tl.minimum(distance, tl.abs(position - last_of_all)) - count * 8e-7
    above = rank + (position > last_of_all).to(tl.int32)
    code = tl.where(relative < 0, 127 - rank, 127 + above) if SIGNED else above - 1
    return code, margin
