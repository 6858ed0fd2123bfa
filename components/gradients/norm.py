"""
The total norm of all gradients of a model.

Squares are summed exactly, so that the norm is bitwise the same for any order and any sharding of the parameters. A
float64 is an integer multiple of the smallest one; the sum of these integers is reduced over ranks in digits, each a
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


def total_norm(gradients: Sequence[Tensor], reduce: Reduce) -> float:
    """The 2-norm of these gradients (any shape) and those of other ranks, whose squares are summed without rounding."""
    norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float64) if gradients else []
    squares: list[float] = torch.stack(list(norms)).square().tolist() if norms else []
    # Infinities and NaN have no digits; their sum tells which of them the norm is.
    odd = [square for square in squares if not math.isfinite(square)]
    digits = reduce.total(torch.tensor([sum(odd), *_digits(() if odd else squares)], dtype=torch.float64))
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
