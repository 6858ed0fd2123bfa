"""
AdamW in Triton with running means of 8 bits: one launch for all weights with the same dtypes.

A program decodes, updates and encodes blocks of 256 elements of a row, each with its own scale. The nearest code is
found from the number's decade, and a comparison with the midpoints around it. Results are bitwise equal to the eager
implementation.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.adamw import ParamState
from drawloom.kernels.dynamic_map import BLOCK, SMALLEST, compute_values_and_midpoints
from drawloom.kernels.triton.gradient_factors import cast_and_scale_if_mixed_dtypes, multiply_by_factors
from drawloom.kernels.triton.launch import cache_launches
from drawloom.kernels.triton.primitives import philox, round_stochastically, upload

TILE = 1
"""Blocks that a program updates at a time; on an H100, 2 take 1.35 times and 4 take 1.5 times as long."""

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
        grads, factors = cast_and_scale_if_mixed_dtypes([grad.contiguous() for grad in grads], factors)
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
            MASTER=self._params[0].remainder is not None,
            MAXIMIZE=self._maximize,
            BLOCK=BLOCK,
            TILE=TILE,
            PROGRAM_BLOCKS=PROGRAM_BLOCKS,
            TABLE_COLUMNS=TABLE_COLUMNS,
            SMALLEST=SMALLEST,
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
    FACTORS: tl.constexpr, ROWS: tl.constexpr, MASTER: tl.constexpr, MAXIMIZE: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, PROGRAM_BLOCKS: tl.constexpr, TABLE_COLUMNS: tl.constexpr, SMALLEST: tl.constexpr,
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
    for offset in range(0, tl.minimum(PROGRAM_BLOCKS, blocks - begin), TILE):
        block = begin + offset + tl.arange(0, TILE)
        column = (block % by_row)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        is_block = block < blocks
        mask = (column < width) & is_block[:, None]
        element = (block // by_row)[:, None] * width + column
        if MASTER:
            high = tl.load(weight + element, mask=mask).to(tl.int16, bitcast=True).to(tl.int32)
            low = tl.load(remainder + element, mask=mask).to(tl.int32)
            old = ((high << 16) + low).to(tl.float32, bitcast=True)
        else:
            old = tl.load(weight + element, mask=mask).to(tl.float32)
        g = multiply_by_factors(tl.load(grad + element, mask=mask, other=0.0), factors, FACTORS)
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
            if counter is not None:
                index = element
                if ROWS:
                    index = element // noise_width * noise_stride + element % noise_width
                new = _round_stochastically_if_bfloat16(new, key, first + index, tl.load(counter), weight)
            tl.store(weight + element, new.to(weight.dtype.element_ty), mask=mask)
        _encode_and_store_moments(m, mean, mean_scale, maps + 256, element, block, mask, is_block, True, SMALLEST)
        _encode_and_store_moments(s, square, square_scale, maps + 768, element, block, mask, is_block, False, SMALLEST)


@triton.jit
def _round_stochastically_if_bfloat16(x, key, index, counter, pointer):
    """Round x stochastically if the pointer is to bfloat16, else return it."""
    if pointer.dtype.element_ty == tl.bfloat16:
        word, _, _, _ = philox(key, index >> 1, counter)
        x = round_stochastically(x, tl.where((index & 1) > 0, word >> 16, word & 0xFFFF))
    return x


@triton.jit
def _load_and_decode_moments(codes, scales, values, element, block, mask, is_block):
    """Return the numbers of codes; 0 outside of the mask."""
    code = tl.load(codes + element, mask=mask, other=0).to(tl.int32)
    scale = tl.load(scales + block, mask=is_block, other=0.0)
    return tl.where(mask, tl.load(values + code) * scale[:, None], 0.0)


@triton.jit
def _encode_and_store_moments(
    numbers, codes, scales, midpoints, element, block, mask, is_block, SIGNED: tl.constexpr, SMALLEST: tl.constexpr
):
    """Store the nearest codes, and the largest magnitudes as scales."""
    # An undefined number makes the scale undefined, as in torch.
    magnitude = tl.where(mask, tl.abs(numbers), 0.0)
    undefined = tl.max(tl.where(magnitude != magnitude, 1, 0), 1)
    scale = tl.max(tl.where(magnitude != magnitude, 0.0, magnitude), 1)
    scale = tl.where(undefined > 0, float("nan"), scale)
    smallest = tl.full(scale.shape, SMALLEST, tl.float32)  # a number below float32's normal ones would be float64
    divisor = tl.maximum(scale, smallest, propagate_nan=tl.PropagateNan.ALL)
    relative = tl.div_rn(numbers, tl.broadcast_to(divisor[:, None], numbers.shape))
    code = _guess_code(relative, SIGNED)
    # The code is the count of midpoints below the number; after the 255 midpoints comes infinity.
    above = tl.load(midpoints + code)
    below = tl.load(midpoints + code - 1, mask=code > 0, other=float("-inf"))
    code = code + (relative > above).to(tl.int32) - (relative <= below).to(tl.int32)
    code = tl.where(relative == relative, code, 255)  # the place of NaN in torch's order
    tl.store(codes + element, code.to(tl.uint8), mask=mask)
    tl.store(scales + block, scale, mask=is_block)


@triton.jit
def _guess_code(relative, SIGNED: tl.constexpr):
    """Return the nearest code to a number from -1 to 1, or a neighbour of it."""
    size = tl.where(relative == relative, tl.abs(relative), 0.0)
    decade = (size > 1e-6).to(tl.int32) + (size > 1e-5).to(tl.int32) + (size > 1e-4).to(tl.int32)
    decade += (size > 1e-3).to(tl.int32) + (size > 1e-2).to(tl.int32) + (size > 1e-1).to(tl.int32)
    small = tl.where(size > 1e-5, 1e4, tl.where(size > 1e-6, 1e5, 1e6))
    large = tl.where(size > 1e-2, tl.where(size > 1e-1, 1.0, 1e1), tl.where(size > 1e-3, 1e2, 1e3))
    leading = size * tl.where(size > 1e-4, large, small)  # from 0.1 to 1
    # Codes divide a decade evenly; each decade has twice as many as the one before.
    count = tl.full(decade.shape, 1 if SIGNED else 2, tl.int32) << decade
    position = tl.maximum((leading - 0.1) * (1 / 0.9), 0.0) * count.to(tl.float32)
    rank = tl.minimum(position.to(tl.int32), count - 1) + count
    if SIGNED:
        return tl.where(relative < 0, 127 - rank, 127 + rank)
    return rank - 1
