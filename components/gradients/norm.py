"""
The norm of all gradients of a model, as if they were one vector.

Squares are added up without any rounding, so that the norm is the same to the last bit in whatever order and on
however many ranks the parameters lie. A float64 is a whole number of the smallest one; the sum of such numbers travels
between ranks in digits, each a float64 that is far from where adding rounds.
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
    """The 2-norm over these gradients and those of ranks that hold others, exact but for one rounding of its square."""
    norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float64) if gradients else []
    squares: list[float] = torch.stack(list(norms)).square().tolist() if norms else []
    odd = [square for square in squares if not math.isfinite(square)]
    digits = reduce.total(torch.tensor([sum(odd), *_digits(() if odd else squares)], dtype=torch.float64))
    total: list[float] = digits.tolist()
    return math.sqrt(_number(total[1:])) if math.isfinite(total[0]) else total[0]


def _digits(numbers: Iterable[float]) -> list[float]:
    """The sum of numbers that are not negative, lowest digit first."""
    whole = sum(map(_whole, numbers))
    return [float(whole >> DIGIT * place & 2**DIGIT - 1) for place in range(DIGITS)]


def _whole(number: float) -> int:
    """As a multiple of the smallest float64."""
    above, below = number.as_integer_ratio()
    return (above << SMALLEST) // below


def _number(digits: Iterable[float]) -> float:
    """Digits, which may have grown beyond their size, as the nearest float64; infinite if there is none."""
    whole = sum(int(digit) << DIGIT * place for place, digit in enumerate(digits))
    try:
        return whole / (1 << SMALLEST)
    except OverflowError:
        return math.inf
