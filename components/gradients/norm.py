"""
The total norm of all gradients of a model: sums of this rank, one small all-reduce, and the root.

The exact norm is bitwise the same for any order of the parameters and any distribution of whole ones over ranks (of
slices, to the last bits), and the host waits for the device:
a float64 is an integer multiple of the smallest one; the sum of these integers is reduced over ranks in digits, each a
float64 small enough that adding does not round.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from drawloom.components.ports.distributed import Reduce

SMALLEST = 1074  # the smallest float64 is 2 to the power of minus that
DIGIT = 32  # bits; 2**21 ranks can add theirs before 53 bits are full
DIGITS = 68  # for the largest float64, 2**1024, times as many parameters as there may be


def exact_norm(gradients: Sequence[Tensor], reduce: Reduce, device: torch.device) -> Tensor:
    """
    Return the 2-norm, float64 (), of these gradients (any shape) on a device and of the other ranks' gradients.

    Gradients may be slices: each element of a model's gradients counts on one of the ranks.
    """
    root = _exact_root(reduce.total(_exact_sum(gradients, device)))
    return torch.tensor(root, dtype=torch.float64, device=device)


def _norms(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The norm of each gradient: float64 (gradients,)."""
    if not gradients:
        return torch.zeros(0, dtype=torch.float64, device=device)
    return torch.stack([*torch._foreach_norm(list(gradients), 2, dtype=torch.float64)])


def _exact_sum(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """What is not finite, and the digits of the sum of squares: float64 (1 + DIGITS,) on the CPU."""
    squares: list[float] = _norms(gradients, device).square().tolist()
    # Infinities and NaN have no digits; their sum tells which of them the norm is.
    odd = [square for square in squares if not math.isfinite(square)]
    return torch.tensor([sum(odd), *_digits(() if odd else squares)], dtype=torch.float64)


def _exact_root(digits: Tensor) -> float:
    total: list[float] = digits.tolist()
    return math.sqrt(_number(total[1:])) if math.isfinite(total[0]) else total[0]


def _digits(numbers: Iterable[float]) -> list[float]:
    """The exact sum of numbers that are not negative, as digits, the lowest first."""
    whole = sum(map(_whole, numbers))
    return [float(whole >> DIGIT * place & 2**DIGIT - 1) for place in range(DIGITS)]


def _whole(number: float) -> int:
    """A float64 as an integer multiple of the smallest one."""
    above, below = number.as_integer_ratio()
    return (above << SMALLEST) // below


def _number(digits: Iterable[float]) -> float:
    """Digits, which sums may have made larger than DIGIT bits, as the nearest float64; infinity on overflow."""
    whole = sum(int(digit) << DIGIT * place for place, digit in enumerate(digits))
    try:
        return whole / (1 << SMALLEST)
    except OverflowError:
        return math.inf
