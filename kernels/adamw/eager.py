"""
8-bit numbers for an optimizer's running means, in blocks along a row; every block has a scale.

Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861, section 2; values have
bitsandbytes' bits. A code stands for a value from -1 or 0 to 1; the spacing grows with the magnitude. Blocks (256
elements) begin anew in every row, so slicing rows changes neither codes nor scales.

AdamW for bfloat16 weights, rounded to the nearest or stochastically: small updates are not lost then.

Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2. Every operation is in float32 and
rounded separately, so that the eager and the Triton implementation agree bitwise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.kernels.stochastic_rounding.eager import philox, round_stochastically, split_into_16bit_halves

BLOCK = 256
"""Row elements with a common scale."""

CODES = 256
DECADES = 7
ZERO_CODE = 127
"""Code for 0 in the map with signs; 0 in the other."""

SMALLEST = 1e-38
"""Divisor for blocks that are zero."""


def compute_code_values(signed: bool) -> Tensor:
    """
    Return the codes' values, ascending, float32 (256,).

    For n from 0 to 6, 10^-(n + 1) to 10^-n is divided into 2^(6 - n) equal intervals, or twice as many if not `signed`.
    Values are the intervals' centres, with both signs if `signed`, and 0 and 1 (not -1).
    """
    values = [0.0, 1.0]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        centres: list[float] = (10.0 ** (decade + 1 - DECADES) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += centres + [-centre for centre in centres if signed]
    return torch.tensor(sorted(values))


@cache
def compute_values_and_midpoints(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the float32 values of all codes (256,), ascending, and the midpoints between neighbours (255,)."""
    values = compute_code_values(signed)
    return values.to(device), ((values[:-1] + values[1:]) / 2).to(device)


def compute_scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales, (..., blocks), for numbers with a shape (..., width)."""
    return (*shape[:-1], -(-shape[-1] // BLOCK))


def decode_8bit(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Return float32 (rows, width) for codes uint8 (rows, width) and scales float32 (rows, blocks)."""
    values, _ = compute_values_and_midpoints(signed, codes.device)
    return values[codes.int()] * scales.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]


class EightBitCodes(NamedTuple):
    """Codes uint8 (rows, width), and their blocks' scales float32 (rows, blocks)."""

    codes: Tensor
    scales: Tensor


def encode_8bit(numbers: Tensor, signed: bool) -> EightBitCodes:
    """Return the nearest codes to numbers, float32 (rows, width)."""
    _, midpoints = compute_values_and_midpoints(signed, numbers.device)
    rows, width = numbers.shape
    padded = F.pad(numbers, (0, -width % BLOCK)).view(rows, -1, BLOCK)
    scales = padded.abs().amax(2)
    codes = torch.bucketize(padded / scales.clamp_min(SMALLEST).unsqueeze(2), midpoints, out_int32=True)
    return EightBitCodes(codes.to(torch.uint8).view(rows, -1)[:, :width].contiguous(), scales)


PER_DRAW = 2
"""Elements per random draw of four words: one word rounds two weights, one their exp_avg, one their exp_avg_sq."""

CHUNK = 2**20
"""Elements that the eager code processes at a time: its temporaries take dozens of bytes per element."""

ALL = 2**62
"""Row width above all weights."""


TENSORS = ("weight", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "remainder", "exp_avg_scale", "exp_avg_sq_scale")
"""A weight's tensors, in the order of kernels' results."""

MEANS = {"exp_avg": True, "exp_avg_sq": False}
"""The means with codes of 8 bits, and whether these have signs."""


@dataclass(frozen=True)
class ParamState:
    """
    A weight (any shape, float32 or bfloat16) with its optimizer state (same shape, float32 or bfloat16).

    `exp_avg` and `exp_avg_sq` are the running means of gradients and of their squares; `max_exp_avg_sq`, if it is not
    None, is the largest mean of squares so far, by which AMSGrad divides (Reddi et al. 2018, algorithm 2). The noise of
    an element depends on `key`, the step's counter, and the element's index in the whole parameter. The weight is a
    part of the parameter: rows of `row_width` elements, `row_stride` elements apart, from element `first_index` on.
    `remainder`, int16, makes a bfloat16 weight a float32 master weight (`join_bfloat16_and_remainder`), which is
    rounded to the nearest. If the means are codes of 8 bits, uint8 (`encode_8bit`), `exp_avg_scale` and
    `exp_avg_sq_scale`, float32 (..., blocks), have the scales of their rows' blocks.
    """

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    weight_decay: float
    key: int = 0
    first_index: int = 0
    row_width: int = ALL
    row_stride: int = 0
    max_exp_avg_sq: Tensor | None = field(default=None, kw_only=True)
    remainder: Tensor | None = field(default=None, kw_only=True)
    exp_avg_scale: Tensor | None = field(default=None, kw_only=True)
    exp_avg_sq_scale: Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        moments = {name: getattr(self, name) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
        dtypes = {name: tensor.dtype for name, tensor in moments.items() if tensor is not None}
        if len({*dtypes.values()}) > 1:
            text = " and ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
            raise ValueError(f"{text}; make the moments one dtype")
        if self.remainder is not None and self.weight.dtype != torch.bfloat16:
            raise ValueError(f"a weight in {self.weight.dtype} has no remainder; make it bfloat16")
        scales = [scale for scale in (self.exp_avg_scale, self.exp_avg_sq_scale) if scale is not None]
        if len(scales) != (2 if self.exp_avg.dtype == torch.uint8 else 0):
            raise ValueError(f"means in {self.exp_avg.dtype} have {len(scales)} scales; codes of 8 bits have 2")
        if scales and self.max_exp_avg_sq is not None:
            raise ValueError("the largest mean of squares can't have 8 bits; take float32 or bfloat16")

    @property
    def weight_and_state_tensors(self) -> list[Tensor]:
        """Return the weight and its state: two means, and the largest mean of squares, remainder and scales if any."""
        return [tensor for name in TENSORS if (tensor := getattr(self, name)) is not None]

    @property
    def is_one_flat_range(self) -> bool:
        """Return whether the weight is one range of the parameter's elements."""
        return self.row_width >= self.weight.numel()

    @property
    def has_8bit_moments(self) -> bool:
        """Return whether the means are codes of 8 bits."""
        return self.exp_avg_scale is not None

    @property
    def has_whole_blocks(self) -> bool:
        """Return whether the means are 8-bit codes, and whole blocks fill a row."""
        return self.has_8bit_moments and self.weight.shape[-1] % BLOCK == 0

    @property
    def has_adjacent_noise_pairs(self) -> bool:
        """Return whether all pairs of elements with a common random draw are neighbours in the weight."""
        return not any(number % PER_DRAW for number in (self.first_index, self.row_width, self.row_stride))


def compute_step_scalars(lr: float, betas: tuple[float, float], eps: float, step: int | Tensor) -> Tensor:
    """
    Return a step's lr, 1 - betas, bias-corrected lr, bias correction of sqrt(exp_avg_sq), and eps: float32 (6,).

    `step` counts from 1. For a tensor with one step per weight, of any dtype (weights,), returns (weights, 6) on its
    device.
    """
    steps = torch.as_tensor(step, dtype=torch.float64)
    beta1, beta2 = betas
    corrected = lr / (1 - beta1**steps), (1 - beta2**steps) ** -0.5
    scalars = lr, 1 - beta1, 1 - beta2, *corrected, eps
    return torch.stack([x if isinstance(x, Tensor) else torch.full_like(steps, x) for x in scalars], -1).float()


LOW_BITS = 16
"""Bits of a float32 number that its bfloat16 half does not have."""


def join_bfloat16_and_remainder(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return float32 numbers from their nearest bfloat16 numbers and the int16 differences of their bits, (n,)."""
    bits = (weight.contiguous().view(torch.int16).int() << LOW_BITS) + remainder.int()
    return bits.view(torch.float32)


def split_into_bfloat16_and_remainder(master: Tensor) -> tuple[Tensor, Tensor]:
    """
    Return the arguments of `join_bfloat16_and_remainder` for float32 numbers (n,); halfway points are rounded away from
    zero.
    """
    bits = master.contiguous().view(torch.int32)
    # A NaN is truncated and made quiet, or a carry would turn it into zero.
    high = torch.where(master.isnan(), bits >> LOW_BITS | 0x40, bits + (1 << LOW_BITS - 1) >> LOW_BITS)
    return high.short().view(torch.bfloat16), (bits - (high << LOW_BITS)).short()


class AdamwEager:
    """Optimizer step in plain torch, one weight at a time; `maximize` turns descent into ascent."""

    def __init__(self, params: Sequence[ParamState], maximize: bool = False) -> None:
        self._params = params
        self._maximize = maximize

    def step(
        self,
        grads: Sequence[Tensor],
        scalars: Tensor,
        counter: int | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """
        Update all weights and their state in place, unless `found_inf`, float32 () on their device, is not 0.

        `grads` has each weight's gradient (its shape, any float dtype); `scalars` comes from `compute_step_scalars`;
        `counter` selects the step's noise, and None rounds to the nearest.
        """
        rows = scalars.expand(len(self._params), -1)
        for param, grad, row in zip(self._params, grads, rows, strict=True):
            flat = grad.reshape(-1)
            ascent = flat.neg() if self._maximize else flat
            _step_in_chunks(param, ascent, row, counter, found_inf)


def _step_in_chunks(
    param: ParamState, grad: Tensor, scalars: Tensor, counter: int | None, found_inf: Tensor | None
) -> None:
    """Step some elements at a time; with means of 8 bits decode, update, and encode whole rows."""
    tensors = {name: tensor for name in TENSORS if (tensor := getattr(param, name)) is not None}
    has_codes = param.has_8bit_moments
    width = param.weight.shape[-1] if has_codes else 1
    chunk = max(CHUNK // width // PER_DRAW, 1) * PER_DRAW
    by_row = {
        name: tensor.detach().reshape(-1, *tensor.shape[-1:] if has_codes else ()) for name, tensor in tensors.items()
    }
    for first in range(0, len(by_row["weight"]), chunk):
        old = {name: tensor[first : first + chunk] for name, tensor in by_row.items()}
        part = slice(first * width, first * width + old["weight"].numel())
        read = {name: old[name].flatten() for name in TENSORS[:4] if name in old}
        if "remainder" in old:
            read["weight"] = join_bfloat16_and_remainder(read["weight"], old["remainder"].flatten())
        for name, is_signed in MEANS.items() if has_codes else ():
            read[name] = decode_8bit(old[name], old[f"{name}_scale"], is_signed).flatten()
        results = _compute_updated_values([*read.values()], grad[part], param.weight_decay, scalars)
        if counter is not None:
            noise = _draw_noise_bits(param, torch.arange(part.start, part.stop, device=grad.device), counter)
            rounded = zip(results, noise, read.values(), strict=False)
            results = [_round_stochastically_if_bfloat16(*arguments) for arguments in rounded]
        new = dict(zip(TENSORS, results, strict=False))
        if "max_exp_avg_sq" in old:
            # The maximum is one of two values in the stored dtype, so it needs no rounding.
            new["max_exp_avg_sq"] = torch.maximum(read["max_exp_avg_sq"].float(), new["exp_avg_sq"].float())
        if "remainder" in old:
            new["weight"], new["remainder"] = split_into_bfloat16_and_remainder(new["weight"])
        for name, is_signed in MEANS.items() if has_codes else ():
            new[name], new[f"{name}_scale"] = encode_8bit(new[name].view(old[name].shape), is_signed)
        for name, result in new.items():
            changed = result.view(old[name].shape).to(old[name].dtype)
            old[name].copy_(changed if found_inf is None else torch.where(found_inf == 0, changed, old[name]))
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            tensor.detach().copy_(by_row[name].view(tensor.shape))


def _round_stochastically_if_bfloat16(result: Tensor, noise: Tensor, target: Tensor) -> Tensor:
    return round_stochastically(result, noise) if target.dtype == torch.bfloat16 else result


def _compute_updated_values(values: list[Tensor], grad: Tensor, weight_decay: float, scalars: Tensor) -> list[Tensor]:
    """Return weight, exp_avg and exp_avg_sq after a step, in float32; a fourth value, max_exp_avg_sq, divides."""
    lr, one_minus_beta1, one_minus_beta2, corrected_lr, sq_correction, eps = scalars.unbind()
    weight, exp_avg, exp_avg_sq, *maxima = (value.float() for value in values)
    grad = grad.float()
    exp_avg = exp_avg + (grad - exp_avg) * one_minus_beta1
    exp_avg_sq = exp_avg_sq + (grad * grad - exp_avg_sq) * one_minus_beta2
    weight = weight - weight * (lr * weight_decay)
    divisor = torch.maximum(maxima[0], exp_avg_sq) if maxima else exp_avg_sq
    root = divisor.double().sqrt().float()  # torch's float32 sqrt is not always correctly rounded on CPUs
    return [weight - (exp_avg * corrected_lr) / (root * sq_correction + eps), exp_avg, exp_avg_sq]


def _draw_noise_bits(param: ParamState, elements: Tensor, counter: int) -> Iterator[Tensor]:
    """
    Yield 16 random bits per element, int64 (n,): first for the weight, then for exp_avg, then for exp_avg_sq.

    `elements`, int64 (n,), are consecutive indices in the weight, beginning with an even one.
    """
    offset = elements
    if not param.is_one_flat_range:
        offset = elements // param.row_width * param.row_stride + elements % param.row_width
    index = param.first_index + offset
    if param.has_adjacent_noise_pairs:
        words = philox(param.key, index[::PER_DRAW] // PER_DRAW, counter)
        return (split_into_16bit_halves(word)[: len(elements)] for word in words)
    return (torch.where(index % 2 > 0, word >> 16, word & 0xFFFF) for word in philox(param.key, index // 2, counter))
