"""
AdamW in Triton, rounded to the nearest or stochastically: one launch for all weights of the same dtypes.

A table on the device holds the addresses of each weight, its gradient and its state; another, which weight and which
part of it each program updates. What changes by step is in two small tensors on the device, so that a launch can be
captured in a CUDA graph and replayed. Nothing is contracted into fused multiply-adds, and division and root are rounded
as IEEE 754 says, so the results are bitwise those of the eager implementation.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.adamw import ParamState
from drawloom.kernels.triton.launch import lean
from drawloom.kernels.triton.primitives import halves, philox, round_stochastically, upload

PART = 2**14
"""Elements that a program updates."""

BLOCK = 512
"""Elements that a program holds at a time: 4 a thread, 8 bytes of bfloat16; larger blocks lower the occupancy."""

ALIGNMENT = 16
"""Bytes of a vectorized load; tensors that are not aligned to it are read element by element."""

TABLE_COLUMNS = 11
"""
Numbers in a row of the table: four addresses, the count of elements, the place of the weight among all, of the noise
the key, the first index, and the width and the stride of rows, and the address of the largest mean of squares, or 0.
"""


class AdamwTriton:
    """The optimizer step with one launch for each combination of dtypes; bitwise the same as AdamwEager."""

    def __init__(self, params: Sequence[ParamState], maximize: bool = False) -> None:
        filled = [place for place, param in enumerate(params) if param.weight.numel()]
        kinds = sorted(filled, key=lambda place: _kind(params[place]))
        groups = [list(group) for _, group in groupby(kinds, key=lambda place: _kind(params[place]))]
        self._launches = [
            (places, _FusedStep([params[place] for place in places], places, maximize)) for places in groups
        ]

    def step(
        self, grads: Sequence[Tensor], scalars: Tensor, counter: int | None = None, found_inf: Tensor | None = None
    ) -> None:
        """Update all weights and their state in place; arguments as for AdamwEager.step (any shape)."""
        for places, launch in self._launches:
            launch.run([grads[place] for place in places], *launch.on_device(scalars, counter), found_inf)


def _kind(param: ParamState) -> tuple[str, ...]:
    """The key by which weights share a launch: dtypes, device, and what else the kernel is compiled for."""
    what = param.weight.dtype, param.exp_avg.dtype, param.weight.device, *_constants(param).values()
    return tuple(map(str, what))


def _constants(param: ParamState) -> dict[str, bool]:
    """
    The kernel's compile-time constants of a weight: whether loads are aligned, which noise belongs to which elements,
    and whether the step divides by the largest mean of squares.
    """
    aligned = all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in param.tensors)
    has_maximum = param.max_exp_avg_sq is not None
    return {"ALIGNED": aligned, "ROWS": not param.is_contiguous, "PAIRS": param.has_pairs, "AMSGRAD": has_maximum}


class _FusedStep:
    """Weights of one kind, none of them empty, and the tables of their addresses."""

    def __init__(self, params: list[ParamState], places: list[int], maximize: bool) -> None:
        if any(not tensor.is_contiguous() for param in params for tensor in param.tensors):
            raise ValueError("weights and their state must be contiguous; use AdamwEager for others")
        self._params, self._places = params, places
        self._device = params[0].weight.device
        self._constants = _constants(params[0]) | {"MAXIMIZE": maximize}
        parts = [(row, part) for row, t in enumerate(self._params) for part in range(-(-t.weight.numel() // PART))]
        self._parts = upload(torch.tensor(parts, dtype=torch.int32), self._device)
        weight_decays = torch.tensor([t.weight_decay for t in self._params], dtype=torch.float32)
        self._weight_decays = upload(weight_decays, self._device)
        # Their dtypes, and no memory, whose address would count.
        self._likes = [x.view(-1)[:0] for x in (params[0].weight, params[0].exp_avg)]
        self._addresses: list[int] = []
        self._table = torch.empty(0)

    def on_device(self, scalars: Tensor, counter: int | None) -> tuple[Tensor, Tensor | None]:
        """The scalars, float32 (6,) or (all weights, 6), and the counter, int64 (1,), on the device."""
        noise_of = None if counter is None else upload(torch.tensor([counter]), self._device)
        return upload(scalars, self._device), noise_of

    def run(
        self, grads: list[Tensor], scalars: Tensor, counter: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        """
        Launch the step with gradients (any shape) in the order of the weights, and what `on_device` gave.

        found_inf, not 0, leaves the weights as they are.
        """
        grads = [_readable(grad) for grad in grads]
        dtypes = {grad.dtype for grad in grads}
        # The kernel reads all gradients with one dtype; mixed ones are rare enough for a copy.
        if len(dtypes) > 1:
            grads = [grad.float() for grad in grads]
        self._update_table(grads)
        weight_like, exp_avg_like = self._likes
        _kernel[(len(self._parts),)](
            self._table,
            self._parts,
            self._weight_decays,
            scalars,
            0 if scalars.ndim == 1 else scalars.stride(0),
            counter,
            found_inf,
            weight_like,
            grads[0].view(-1)[:0],
            exp_avg_like,
            **self._constants,
            PART=PART,
            BLOCK=BLOCK,
            TABLE_COLUMNS=TABLE_COLUMNS,
            enable_fp_fusion=False,
        )

    def _update_table(self, grads: list[Tensor]) -> None:
        addresses = [grad.data_ptr() for grad in grads]
        # Gradients move when they are freed and allocated again; the other tensors stay where they are.
        if addresses != self._addresses:
            rows = [_row(*of) for of in zip(self._params, addresses, self._places, strict=True)]
            self._table = upload(torch.tensor(rows), self._device)
            self._addresses = addresses


def _row(param: ParamState, grad: int, place: int) -> list[int]:
    weight, exp_avg, exp_avg_sq, *greatest = (tensor.data_ptr() for tensor in param.tensors)
    noise = param.key, param.first, param.width, param.stride
    return [weight, grad, exp_avg, exp_avg_sq, param.weight.numel(), place, *noise, *(greatest or [0])]


def _readable(grad: Tensor) -> Tensor:
    """The gradient, contiguous and aligned for vectorized loads."""
    grad = grad.contiguous()
    return grad if grad.data_ptr() % ALIGNMENT == 0 else grad.clone()


# fmt: off
@lean
@triton.jit
def _kernel(
    table, parts, decays, scalars, scalars_stride, counter, found_inf, weight_like, grad_like, exp_avg_like,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr,
    PART: tl.constexpr, BLOCK: tl.constexpr, TABLE_COLUMNS: tl.constexpr,
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
    greatest = tl.load(table + 10).to(exp_avg_like.dtype)
    if ALIGNED:
        greatest = tl.multiple_of(greatest, 16)
    count = tl.load(table + 4)
    if found_inf is not None:
        count = tl.where(tl.load(found_inf) == 0, count, 0)
    scalars += tl.load(table + 5) * scalars_stride
    key, first = tl.load(table + 6), tl.load(table + 7)
    width, stride = tl.load(table + 8), tl.load(table + 9)
    lr, one_minus_beta1, one_minus_beta2 = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    corrected_lr, sq_correction, eps = tl.load(scalars + 3), tl.load(scalars + 4), tl.load(scalars + 5)
    lr_decay = lr * tl.load(decays + row)
    noise_of = None if counter is None else tl.load(counter)
    # fmt: off
    for block in range(0, tl.minimum(PART, count - start), BLOCK):
        place = start + block + tl.arange(0, BLOCK)
        if PAIRS:  # a draw for two elements, which are neighbours
            index = _index(start + block + 2 * tl.arange(0, BLOCK // 2), first, width, stride, ROWS)
        else:
            index = _index(place, first, width, stride, ROWS)
        if start + block + BLOCK <= count:
            _update(weight, grad, exp_avg, exp_avg_sq, greatest, place, None, key, index, noise_of, PAIRS, AMSGRAD,
                    MAXIMIZE, lr_decay, one_minus_beta1, one_minus_beta2, corrected_lr, sq_correction, eps)
        else:
            _update(weight, grad, exp_avg, exp_avg_sq, greatest, place, place < count, key, index, noise_of, PAIRS,
                    AMSGRAD, MAXIMIZE, lr_decay, one_minus_beta1, one_minus_beta2, corrected_lr, sq_correction, eps)


@triton.jit
def _index(place, first, width, stride, ROWS: tl.constexpr):
    """Where elements at these places of a weight are in its parameter."""
    if ROWS:
        place = place // width * stride + place % width
    return first + place


@triton.jit
def _update(
    weight, grad, exp_avg, exp_avg_sq, greatest, place, mask, key, index, counter, PAIRS: tl.constexpr,
    AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr,
    lr_decay, one_minus_beta1, one_minus_beta2, corrected_lr, sq_correction, eps,
):
    # fmt: on
    """The AdamW step of the elements at these places, with noise of these indices: of each, or of the even ones."""
    old = tl.load(weight + place, mask=mask).to(tl.float32)
    g = tl.load(grad + place, mask=mask).to(tl.float32)
    m = tl.load(exp_avg + place, mask=mask).to(tl.float32)
    s = tl.load(exp_avg_sq + place, mask=mask).to(tl.float32)
    if MAXIMIZE:
        g = -g
    m = m + (g - m) * one_minus_beta1
    s = s + (g * g - s) * one_minus_beta2
    old = old - old * lr_decay
    divisor = s
    if AMSGRAD:
        most = tl.load(greatest + place, mask=mask).to(tl.float32)
        divisor = tl.maximum(most, s, propagate_nan=tl.PropagateNan.ALL)
    new = old - tl.div_rn(m * corrected_lr, tl.sqrt_rn(divisor) * sq_correction + eps)
    if counter is not None:
        for_weight, for_mean, for_square, _ = philox(key, index >> 1, counter)
        new = _rounded(new, for_weight, index, weight, PAIRS)
        m = _rounded(m, for_mean, index, exp_avg, PAIRS)
        s = _rounded(s, for_square, index, exp_avg_sq, PAIRS)
    if AMSGRAD:  # of the mean as it is kept: of values that are rounded up and down, the largest needs no rounding
        most = tl.maximum(most, s.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
        tl.store(greatest + place, most.to(greatest.dtype.element_ty), mask=mask)
    # What is not rounded yet is rounded to the nearest.
    tl.store(weight + place, new.to(weight.dtype.element_ty), mask=mask)
    tl.store(exp_avg + place, m.to(exp_avg.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq + place, s.to(exp_avg_sq.dtype.element_ty), mask=mask)


@triton.jit
def _rounded(x, word, index, pointer, PAIRS: tl.constexpr):
    """x in the pointer's dtype: float32 as it is, or stochastically rounded to bfloat16 with halves of the words."""
    if pointer.dtype.element_ty == tl.bfloat16:
        if PAIRS:
            x = round_stochastically(x, halves(word))
        else:
            x = round_stochastically(x, tl.where((index & 1) > 0, word >> 16, word & 0xFFFF))
    return x
