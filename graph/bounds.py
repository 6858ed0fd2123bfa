"""Checks of numbers, whose bounds others may read: the schema does."""

from typing import Any

import attrs


@attrs.frozen
class Bound:
    """A check of a number; what is none passes."""

    at_least: float | None = None
    above: float | None = None
    below: float | None = None

    def __call__(self, value: Any) -> str | None:
        if not isinstance(value, int | float):
            return None
        if self.at_least is not None and self.below is not None:
            inside = self.at_least <= value < self.below
            return None if inside else f"{value} is not in [{self.at_least}, {self.below})"
        if self.at_least is not None and value < self.at_least:
            return f"{value} is less than {self.at_least}"
        return f"{value} is not above {self.above}" if self.above is not None and value <= self.above else None


def at_least(bound: float) -> Bound:
    """A check: no less than `bound`."""
    return Bound(at_least=bound)


def above(bound: float) -> Bound:
    """A check: more than `bound`."""
    return Bound(above=bound)


def between(low: float, high: float) -> Bound:
    """A check: from `low` to below `high`."""
    return Bound(at_least=low, below=high)
