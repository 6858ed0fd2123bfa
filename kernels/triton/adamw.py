"""
AdamW in Triton, rounded to the nearest or stochastically: one launch for all weights with the same dtypes.

A table on the device holds the addresses of every weight, its gradient and its state. A second table assigns a weight
and a part of it to every program. Two small tensors on the device hold the values that change from step to step, so a
launch can be captured in a CUDA graph and replayed. Nothing is contracted into fused multiply-adds, and division
and square root are rounded by IEEE 754, so the results are bitwise equal to the eager implementation.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.adamw import ParamState
from drawloom.kernels.triton.gradient_factors import (
    ALIGNMENT,
    align_gradient,
    cast_and_scale_if_mixed_dtypes,
    multiply_by_factors,
)
from drawloom.kernels.triton.launch import cache_launches
from drawloom.kernels.triton.primitives import philox, round_stochastically, split_into_16bit_halves, upload

PART = 2**14
"""Elements per program."""

BLOCK = 512
"""Elements per iteration of a program: 4 per thread, 8 bytes in bfloat16; larger ones lower the occupancy."""

TABLE_COLUMNS = 12
"""
Numbers in a row of the table: four addresses, the element count, the weight's index among all weights, the
noise's key, first index, row width and row stride, and the addresses of max_exp_avg_sq and of the remainder, or 0.
"""


class AdamwTriton:
    """Optimizer step with one launch for each dtype combination; bitwise equal to AdamwEager."""

    def __init__(self, params: Sequence[ParamState], maximize: bool = False) -> None:
        filled = [index for index, param in enumerate(params) if param.weight.numel()]
        kinds = sorted(filled, key=lambda index: _get_launch_group_key(params[index]))
        groups = [list(group) for _, group in groupby(kinds, key=lambda index: _get_launch_group_key(params[index]))]
        self._launches = [(indices, _build_step([params[n] for n in indices], indices, maximize)) for indices in groups]

    def step(
        self,
        grads: Sequence[Tensor],
        scalars: Tensor,
        counter: int | None = None,
        found_inf: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> None:
        """Update all weights and their state in place. The arguments are those of AdamwEager.step."""
        for indices, launch in self._launches:
            launch.run(
                [grads[index] for index in indices], *launch.upload_scalars(scalars, counter), found_inf, factors
            )


def _build_step(params: list[ParamState], indices: list[int], maximize: bool) -> Any:
    if not params[0].has_8bit_moments:
        return _FusedStep(params, indices, maximize)
    from drawloom.kernels.triton.adamw_codes import Fused8bitStep

    return Fused8bitStep(params, indices, maximize)


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
        self._kernel_constants = _kernel_constants(params[0]) | {"MAXIMIZE": maximize}
        parts = [(row, part) for row, t in enumerate(self._params) for part in range(-(-t.weight.numel() // PART))]
        self._parts = upload(torch.tensor(parts, dtype=torch.int32), self._device)
        weight_decays = torch.tensor([t.weight_decay for t in self._params], dtype=torch.float32)
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
        factors: Tensor | None = None,
    ) -> None:
        """
        Launch the step with gradients (any shape) in the weights' order, and the tensors from `upload_scalars`.

        The weights do not change if `found_inf` is not 0. `factors`, float32 (factors,), multiply the gradients.
        """
        grads, factors = cast_and_scale_if_mixed_dtypes([align_gradient(grad) for grad in grads], factors)
        self._update_table(grads)
        weight_like, exp_avg_like = self._likes
        _adamw_kernel[(len(self._parts),)](
            self._table,
            self._parts,
            self._weight_decays,
            scalars,
            0 if scalars.ndim == 1 else scalars.stride(0),
            counter,
            found_inf,
            factors,
            weight_like,
            grads[0].view(-1)[:0],
            exp_avg_like,
            **self._kernel_constants,
            FACTORS=0 if factors is None else len(factors),
            PART=PART,
            BLOCK=BLOCK,
            TABLE_COLUMNS=TABLE_COLUMNS,
            enable_fp_fusion=False,
        )

    def _update_table(self, grads: list[Tensor]) -> None:
        addresses = [grad.data_ptr() for grad in grads]
        # Gradients move when they are freed and allocated again; the addresses of other tensors are constant.
        if addresses != self._addresses:
            rows = [_make_table_row(*fields) for fields in zip(self._params, addresses, self._indices, strict=True)]
            self._table = upload(torch.tensor(rows), self._device)
            self._addresses = addresses


def _make_table_row(param: ParamState, grad: int, index: int) -> list[int]:
    """Return a weight's table row: addresses, size, index, noise parameters and optional addresses."""
    weight, exp_avg, exp_avg_sq = (tensor.data_ptr() for tensor in param.weight_and_state_tensors[:3])
    noise = param.key, param.first, param.width, param.stride
    optional = (0 if tensor is None else tensor.data_ptr() for tensor in (param.max_exp_avg_sq, param.remainder))
    return [weight, grad, exp_avg, exp_avg_sq, param.weight.numel(), index, *noise, *optional]


# fmt: off
@cache_launches
@triton.jit
def _adamw_kernel(
    table, parts, decays, scalars, scalars_stride, counter, found_inf, factors, weight_like, grad_like,
    exp_avg_like,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, AMSGRAD: tl.constexpr, MASTER: tl.constexpr,
    MAXIMIZE: tl.constexpr, FACTORS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    TABLE_COLUMNS: tl.constexpr,
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
    max_sq = tl.load(table + 10).to(exp_avg_like.dtype)
    if ALIGNED:
        max_sq = tl.multiple_of(max_sq, 16)
    remainder = tl.load(table + 11).to(tl.pointer_type(tl.int16))
    if ALIGNED:
        remainder = tl.multiple_of(remainder, 16)
    count = tl.load(table + 4)
    if found_inf is not None:
        count = tl.where(tl.load(found_inf) == 0, count, 0)
    scalars += tl.load(table + 5) * scalars_stride
    key, first = tl.load(table + 6), tl.load(table + 7)
    width, stride = tl.load(table + 8), tl.load(table + 9)
    lr, one_minus_beta1, one_minus_beta2 = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    corrected_lr, sq_correction, eps = tl.load(scalars + 3), tl.load(scalars + 4), tl.load(scalars + 5)
    lr_decay = lr * tl.load(decays + row)
    noise_step = None if counter is None else tl.load(counter)
    # fmt: off
    for block in range(0, tl.minimum(PART, count - start), BLOCK):
        element = start + block + tl.arange(0, BLOCK)
        if PAIRS:  # one draw for two neighbouring elements
            index = _parameter_index(start + block + 2 * tl.arange(0, BLOCK // 2), first, width, stride, ROWS)
        else:
            index = _parameter_index(element, first, width, stride, ROWS)
        if start + block + BLOCK <= count:
            _update_elements(weight, grad, factors, exp_avg, exp_avg_sq, max_sq, remainder, element, None, key, index,
                    noise_step, PAIRS, AMSGRAD, MASTER, MAXIMIZE, FACTORS, lr_decay, one_minus_beta1, one_minus_beta2,
                    corrected_lr, sq_correction, eps)
        else:
            _update_elements(weight, grad, factors, exp_avg, exp_avg_sq, max_sq, remainder, element, element < count,
                    key, index, noise_step, PAIRS, AMSGRAD, MASTER, MAXIMIZE, FACTORS, lr_decay, one_minus_beta1,
                    one_minus_beta2, corrected_lr, sq_correction, eps)


@triton.jit
def _parameter_index(element, first, width, stride, ROWS: tl.constexpr):
    """Return the indices in the whole parameter of elements of its part, the weight."""
    if ROWS:
        element = element // width * stride + element % width
    return first + element


@triton.jit
def _update_elements(
    weight, grad, factors, exp_avg, exp_avg_sq, max_sq, remainder, element, mask, key, index, counter,
    PAIRS: tl.constexpr, AMSGRAD: tl.constexpr, MASTER: tl.constexpr, MAXIMIZE: tl.constexpr, FACTORS: tl.constexpr,
    lr_decay, one_minus_beta1, one_minus_beta2, corrected_lr, sq_correction, eps,
):
    # fmt: on
    """Update elements by AdamW, with noise for the parameter indices `index`, of all elements or only the even ones."""
    if MASTER:
        high = tl.load(weight + element, mask=mask).to(tl.int16, bitcast=True).to(tl.int32)
        low = tl.load(remainder + element, mask=mask).to(tl.int32)
        old = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        old = tl.load(weight + element, mask=mask).to(tl.float32)
    g = multiply_by_factors(tl.load(grad + element, mask=mask), factors, FACTORS)
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
        tl.store(max_sq + element, maximum.to(max_sq.dtype.element_ty), mask=mask)
    # These casts round float32 values without noise to the nearest.
    if MASTER:
        bits = new.to(tl.int32, bitcast=True)
        high = tl.where(new != new, bits >> 16 | 0x40, bits + 0x8000 >> 16)
        tl.store(weight + element, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
        tl.store(remainder + element, (bits - (high << 16)).to(tl.int16), mask=mask)
    else:
        tl.store(weight + element, new.to(weight.dtype.element_ty), mask=mask)
    tl.store(exp_avg + element, m.to(exp_avg.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq + element, s.to(exp_avg_sq.dtype.element_ty), mask=mask)


@triton.jit
def _round_stochastically_if_bfloat16(x, word, index, pointer, PAIRS: tl.constexpr):
    """Round x stochastically with halves of the random words if the pointer is to bfloat16, else return it."""
    if pointer.dtype.element_ty == tl.bfloat16:
        if PAIRS:
            x = round_stochastically(x, split_into_16bit_halves(word))
        else:
            x = round_stochastically(x, tl.where((index & 1) > 0, word >> 16, word & 0xFFFF))
    return x
