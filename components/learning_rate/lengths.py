"""Lengths of parts of a run, as recipes give them: by steps, tokens, or a share of all steps."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from drawloom.components.ports.data import PackedDataset
from drawloom.components.ports.run import Batching
from drawloom.graph import Problem

UNITS = ("steps", "tokens", "percent")


def steps_of(
    steps: int | None, tokens: int | None, percent: float | None, total: int, sizes: "TokenCounts", *, at_end: bool
) -> int:
    """
    A length in steps, 0 if none is given; a share is of all `total` steps.

    One of tokens takes the least number of steps that have them: of the first ones or, `at_end`, of the last.
    """
    if tokens is not None:
        if at_end:
            # One step less than those that go beyond what is left.
            return total - max(sizes.steps_until(sizes.tokens_after(total) - tokens + 1) - 1, 0)
        return sizes.steps_until(tokens)
    return steps if steps is not None else int(total * (percent or 0.0) / 100)


class TokenCounts:
    """How many tokens the steps of a run have, counted in full rows."""

    def __init__(self, batching: Batching | None, rows: PackedDataset | None) -> None:
        self._batching = batching
        self._rows = rows

    def tokens_after(self, steps: int) -> int:
        """The tokens of the first `steps` steps."""
        if self._batching is None or self._rows is None:
            raise ValueError("lengths in tokens need the sizes of steps and rows")
        return self._batching.start(steps + 1) * self._rows.length

    def steps_until(self, tokens: int) -> int:
        """The least number of steps that have as many tokens, or more."""
        most = 1
        while self.tokens_after(most) < tokens:
            most *= 2
        return bisect_left(range(most + 1), tokens, key=self.tokens_after)


def several_given(node: Any, name: str) -> Iterator[Problem]:
    """A problem if a length is given in more than one unit."""
    given = [f"{name}_{unit}" for unit in UNITS if node.settings[f"{name}_{unit}"] is not None]
    if len(given) > 1:
        yield node.problem(given[-1], f"both {given[0]} and {given[-1]} are given", "leave one of them out")


def tokens_without_sizes(node: Any, key: Any, text: str) -> Iterator[Problem]:
    """A problem with a length in tokens at `key` if the node lacks an edge to what has the sizes of steps and rows."""
    missing = [f'{edge} = "@{name}"' for edge, name in SIZES.items() if not node.neighbours(edge)]
    if missing:
        yield node.problem(key, f"{text} needs the sizes of steps and rows", f"write {' and '.join(missing)}")


SIZES = {"batching": "batch", "rows": "packing"}
