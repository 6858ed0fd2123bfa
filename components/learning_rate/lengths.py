"""Lengths of parts of a run, as recipes give them: by steps, tokens, or a share of all steps."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

import attrs

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


@attrs.frozen
class TokenCounts:
    """Token counts of a run's steps, in full rows: `tokens_after(n)` is the number of tokens of the first n steps."""

    tokens_after: Callable[[int], int]

    def steps_until(self, tokens: int) -> int:
        """Return the least number of steps that have at least `tokens` tokens."""
        most = 1
        while self.tokens_after(most) < tokens:
            most *= 2
        return bisect_left(range(most + 1), tokens, key=self.tokens_after)


def token_counts(batching: Batching | None, rows: PackedDataset | None) -> TokenCounts:
    """Return the token counts of a run; without batch and row sizes, counting raises ValueError."""

    def tokens_after(steps: int) -> int:
        if batching is None or rows is None:
            raise ValueError("lengths in tokens need the sizes of steps and rows")
        return batching.start(steps + 1) * rows.length

    return TokenCounts(tokens_after)


def declared_token_counts(node: Any) -> TokenCounts | None:
    """Return the token counts that settings imply before anything is built; None if they do not, as with a ramp."""
    batch, rows = (node.neighbour(edge) for edge in SIZES)
    if not batch or not rows or batch.settings.get("ramp"):
        return None
    size, length = batch.settings.get("global_size"), rows.settings.get("length")
    return TokenCounts(lambda steps: steps * size * length) if size and length else None


def several_given(node: Any, name: str) -> Iterator[Problem]:
    """A problem if a length is given in more than one unit."""
    given = [f"{name}_{unit}" for unit in UNITS if node.settings[f"{name}_{unit}"] is not None]
    if len(given) > 1:
        yield node.problem(given[-1], f"both {given[0]} and {given[-1]} are given", "leave one of them out")


def declared_steps(node: Any, name: str, total: int, *, at_end: bool) -> int:
    """Return a length in steps as a node's settings give it, or 0 if it is in tokens whose step is not known yet."""
    steps, tokens, percent = (node.settings[f"{name}_{unit}"] for unit in UNITS)
    sizes = declared_token_counts(node)
    if sizes is None and tokens is not None:
        return 0
    return steps_of(steps, tokens, percent, total, sizes or token_counts(None, None), at_end=at_end)


def unit_given(node: Any, name: str) -> str:
    """Return the setting that gives a length: `warmup_steps`, say."""
    return next(key for unit in UNITS if node.settings[key := f"{name}_{unit}"] is not None)


def tokens_without_sizes(node: Any, key: Any, text: str) -> Iterator[Problem]:
    """A problem with a length in tokens at `key` if the node lacks an edge to what has the sizes of steps and rows."""
    missing = [f'{edge} = "@{name}"' for edge, name in SIZES.items() if not node.neighbour(edge)]
    if missing:
        yield node.problem(key, f"{text} needs the sizes of steps and rows", f"write {' and '.join(missing)}")


SIZES = {"batching": "batch", "rows": "packing"}
