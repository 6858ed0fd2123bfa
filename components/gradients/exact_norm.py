"""
Exact gradient norm, bitwise equal for any parameter order and any distribution of whole parameters over ranks.

If ranks own slices, it may differ in the last bits. The host waits for the device. Every float64 is the smallest
float64 times an integer. The integers' sum is reduced over ranks in digits; a digit is a float64 small enough to be
added without rounding.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from drawloom.ports import Reduce

FLOAT64_SHIFT = 1074  # the smallest float64 is 2**-1074
DIGIT_BITS = 32  # 2**21 ranks can add their digits before the 53 bits of a float64 are full
DIGITS = 68  # for the largest float64, 2**1024, times the largest number of parameters


def compute_exact_norm(gradients: Sequence[Tensor], reduce: Reduce, device: torch.device) -> Tensor:
    """
    Return the 2-norm, float64 (), of all ranks' gradients (any shape).

    Gradients may be slices, but every gradient element must be passed on exactly one rank.
    """
    root = _compute_root_of_digits(reduce.sum_over_ranks(_sum_squares_as_exact_digits(gradients, device)))
    return torch.tensor(root, dtype=torch.float64, device=device)


def _compute_gradient_norms(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return every gradient's 2-norm, float64 (gradients,)."""
    if not gradients:
        return torch.zeros(0, dtype=torch.float64, device=device)
    return torch.stack([*torch._foreach_norm(list(gradients), 2, dtype=torch.float64)])


def _sum_squares_as_exact_digits(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """
    Return the sum of non-finite squares, then the digits for the sum of squares: float64 (1 + DIGITS,) on the CPU.
    """
    squares: list[float] = _compute_gradient_norms(gradients, device).square().tolist()
    # Infinities and NaN have no digits; their sum is the norm.
    nonfinite = [square for square in squares if not math.isfinite(square)]
    return torch.tensor([sum(nonfinite), *_sum_as_exact_digits(() if nonfinite else squares)], dtype=torch.float64)


def _compute_root_of_digits(digits: Tensor) -> float:
    """Return the square root of `_sum_squares_as_exact_digits`'s result; infinity or NaN if a gradient has one."""
    total: list[float] = digits.tolist()
    return math.sqrt(_join_digits(total[1:])) if math.isfinite(total[0]) else total[0]


def _sum_as_exact_digits(numbers: Iterable[float]) -> list[float]:
    """Return the exact sum of nonnegative numbers as digits, DIGIT_BITS bits each, the lowest first."""
    total = sum(map(_convert_to_integer, numbers))
    return [float(total >> DIGIT_BITS * index & 2**DIGIT_BITS - 1) for index in range(DIGITS)]


def _convert_to_integer(number: float) -> int:
    """Return a float64 as an integer, in units of the smallest float64."""
    numerator, denominator = number.as_integer_ratio()
    return (numerator << FLOAT64_SHIFT) // denominator


def _join_digits(digits: Iterable[float]) -> float:
    """Return the nearest float64 to digits, which may exceed DIGIT_BITS after a sum; infinity on overflow."""
    total = sum(int(digit) << DIGIT_BITS * index for index, digit in enumerate(digits))
    try:
        return total / (1 << FLOAT64_SHIFT)
    except OverflowError:
        return math.inf
