"""Curves from one value to another, by progress in [0, 1]."""

import math
from typing import Literal

Curve = Literal["linear", "cosine", "polynomial", "exponential"]

SMALLEST = 1e-8
"""What stands for zero at either end of an exponential curve, which can't reach it."""


def between(curve: Curve, start: float, end: float, progress: float, power: float = 2.0) -> float:
    """The value of a curve; `power` bends the polynomial one."""
    match curve:
        case "linear":
            return start + (end - start) * progress
        case "cosine":
            return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
        case "polynomial":
            return start + (end - start) * math.pow(progress, power)
        case "exponential":
            low, high = math.log(max(start, SMALLEST)), math.log(max(end, SMALLEST))
            return math.exp(low + (high - low) * progress)
