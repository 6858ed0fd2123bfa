"""
One forward, one backward, over several stages on each rank: the rows of 1F1B and of its relatives.

Microbatches go in rounds of about as many as there are ranks: a rank takes a whole round through its first stage, then
through the second, and so on; backwards likewise, its last stage first. A rank begins with some forwards, then goes one
forward and one backward until the forwards run out.
"""

from collections.abc import Callable

from drawloom.components.pipeline.program.row_builder import Row, W, forward


def rounds(ranks: int, microbatches: int) -> list[int]:
    """How many microbatches go in each round: as many as ranks or a few more, the first rounds the larger ones."""
    count = max(1, microbatches // ranks)
    share, left = divmod(microbatches, count)
    return [share + 1] * left + [share] * (count - left)


def in_rounds(letter: Callable[[int], int], sizes: list[int], stages: range) -> Row:
    """Each round through a rank's own stages, in their order."""
    return [letter(own) for size in sizes for own in stages for _ in range(size)]


def interleaved(
    rank: int,
    ranks: int,
    stages: int,
    microbatches: int,
    letter: Callable[[int], int],
    lead: int,
    lag: int | None = None,
) -> Row:
    """
    One rank's row. `letter` makes that of a backward from an own stage.

    The rank that is k before the last one goes `lead * k` forwards further ahead. With `lag`, weight gradients are
    paid one a backward, once that many are owed.
    """
    sizes = rounds(ranks, microbatches)
    forwards = in_rounds(forward, sizes, range(stages))
    backwards = in_rounds(letter, sizes, range(stages)[::-1])
    ahead = (stages - 1) * sizes[0] + lead * (ranks - 1 - rank)
    row = forwards[:ahead]
    for number, backward in enumerate(backwards):
        row += forwards[ahead + number : ahead + number + 1]
        row.append(backward)
        if lag is not None and number >= lag:
            row.append(W)
    return row if lag is None else row + [W] * min(lag, len(backwards))
