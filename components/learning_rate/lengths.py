"""Lengths of a run's parts in recipe units: steps, tokens, or a percentage of all steps."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from drawloom import Problem
from drawloom.ports import Batching, PackedDataset


def convert_length_to_steps(
    steps: int | None, tokens: int | None, percent: float | None, total: int, sizes: "TokenCounts", *, at_end: bool
) -> int:
    """
    Convert a length to steps; 0 if no unit is set. The percentage refers to all `total` steps. A length in tokens
    becomes the smallest number of first steps (last steps with `at_end`) with so many tokens.
    """
    if tokens is not None:
        if at_end:
            # The last steps begin with the step that would leave fewer than `tokens` if it came before them.
            return total - max(sizes.count_steps_to_reach(sizes.tokens_after(total) - tokens + 1) - 1, 0)
        return sizes.count_steps_to_reach(tokens)
    return steps if steps is not None else int(total * (percent or 0.0) / 100)


@attrs.frozen
class TokenCounts:
    """Token counts of a run's steps, in full rows: `tokens_after(n)` is the token count of the first n steps."""

    tokens_after: Callable[[int], int]

    def count_steps_to_reach(self, tokens: int) -> int:
        """Return the smallest step count with at least `tokens` tokens."""
        return bisect_left(range(2**62), tokens, key=self.tokens_after)


def create_token_counts(batching: Batching | None, rows: PackedDataset | None) -> TokenCounts:
    """Return a run's token counts. Counting raises ValueError without the batch size and sequence length."""

    def tokens_after(steps: int) -> int:
        if batching is None or rows is None:
            raise ValueError("lengths in tokens need the sizes of steps and rows")
        return batching.first_row_position(steps + 1) * rows.length

    return TokenCounts(tokens_after)


def create_token_counts_unless_ramped(node: Any) -> TokenCounts | None:
    """Return the token counts implied by settings; None if they depend on the run, as with a batch-size ramp."""
    batch, rows = (node.neighbour(edge) for edge in SIZES)
    if not batch or not rows or batch.settings.get("ramp"):
        return None
    size, length = batch.settings.get("global_size"), rows.settings.get("length")
    return TokenCounts(lambda steps: steps * size * length) if size and length else None


def report_missing_batch_or_rows_edge(node: Any, key: Any, text: str) -> Iterator[Problem]:
    """Yield a problem at `key` for a length in tokens if the node has no edge to the batch size or to the rows."""
    missing = [f'{edge} = "@{name}"' for edge, name in SIZES.items() if not node.neighbour(edge)]
    if missing:
        yield node.problem(key, f"{text} needs the sizes of steps and rows", f"write {' and '.join(missing)}")


SIZES = {"batching": "batch", "rows": "packing"}
