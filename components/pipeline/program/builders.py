"""Programs built from rows of op codes, as in the figures of papers: the order is written, microbatches are counted."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from drawloom.components.ports.program import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Program


def loop(ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Round and round: the last rank hands over to the first. The rank of each stage."""
    return tuple(range(ranks)) * stages_per_rank


def vee(ranks: int) -> tuple[int, ...]:
    """
    Down and up again, two stages a rank: the rank of each stage.

    The last rank hands over to itself, and the first one holds both ends of the model.
    """
    return (*range(ranks), *reversed(range(ranks)))


def stages_of(rank: int, owners: tuple[int, ...]) -> list[int]:
    """A rank's stages, in order."""
    return [stage for stage, owner in enumerate(owners) if owner == rank]


Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

Row = list[int]
"""One rank's letters, in order. Letters are plain numbers, so that rows are made, and read, fast."""

_JOINT = 1 << 32
"""The letter of an overlap is its second letter times this, and its first."""


def forward(own: int) -> int:
    """The letter of a forward of a rank's own stage of this number."""
    return 4 * own + FORWARD + 4


def backward(own: int) -> int:
    """The letter of a full backward."""
    return 4 * own + BACKWARD + 4


def backward_input(own: int) -> int:
    """The letter of a backward towards the inputs."""
    return 4 * own + BACKWARD_INPUT + 4


def backward_weight(own: int) -> int:
    """The letter of a backward towards the weights, the oldest that this stage owes."""
    return 4 * own + BACKWARD_WEIGHT + 4


F0, F1 = forward(0), forward(1)
B0, B1 = backward(0), backward(1)
I0, I1 = backward_input(0), backward_input(1)
W0, W1 = backward_weight(0), backward_weight(1)
W = backward_weight(-1)
"""The letter of a backward towards the weights, the oldest that this rank owes."""


def overlap(first: int, second: int) -> int:
    """The letter of two pieces of work that may run together."""
    return first + second * _JOINT


def build_program(
    rows: Sequence[Row], owners: tuple[int, ...], microbatches: int, *, newest_first: bool = False
) -> Program:
    """
    The program whose line for each rank is a row of letters; stage s belongs to rank `owners[s]`.

    With `newest_first`, backwards take the microbatches from the last to the first.
    """
    stages = np.argsort(np.array(owners), kind="stable").reshape(len(rows), -1)
    counted = [_count(np.array(row, dtype=np.int64)) for row in rows]
    own, work, microbatch, joined = (np.concatenate(column) for column in zip(*counted, strict=True))
    bounds = np.concatenate([[0], np.cumsum([len(line[0]) for line in counted])])
    stage = stages[np.repeat(np.arange(len(rows)), np.diff(bounds)), own]
    if newest_first:
        microbatch[work != FORWARD] = microbatches - 1 - microbatch[work != FORWARD]
    woven = Program(owners, microbatches, bounds, stage, work, microbatch, joined)
    return woven if (microbatch < microbatches).all() else woven.select(microbatch < microbatches)


def _count(letters: Ints) -> tuple[Ints, Ints, Ints, Bools]:
    """Own stage, work, microbatch and whether it is joined to the one before, of each action in a row."""
    letters, joined = _split(letters)
    own, work = letters // 4 - 1, letters % 4
    microbatch = np.zeros_like(own)
    for number in range(own.max(initial=-1) + 1):
        for kind in (work == FORWARD, (work == BACKWARD) | (work == BACKWARD_INPUT)):
            places = np.flatnonzero(kind & (own == number))
            microbatch[places] = np.arange(len(places))
        mine = own == number
        _settle(own, microbatch, mine & (work == BACKWARD_INPUT), mine & (work == BACKWARD_WEIGHT))
    _settle(own, microbatch, work == BACKWARD_INPUT, own == -1)
    return own, work, microbatch, joined


def _split(letters: Ints) -> tuple[Ints, Bools]:
    """Overlaps as two letters each, the second joined to the first."""
    second, first = np.divmod(letters, _JOINT)
    if not second.any():
        return letters, np.zeros(len(letters), dtype=bool)
    pairs = np.stack([first, second], axis=1).ravel()
    joined = np.tile([False, True], len(letters))
    return pairs[pairs > 0], joined[pairs > 0]


def _settle(own: Ints, microbatch: Ints, debts: Bools, payments: Bools) -> None:
    """The n-th of these weight gradients is that of the n-th of these input gradients."""
    owed, paid = np.flatnonzero(debts), np.flatnonzero(payments)
    own[paid], microbatch[paid] = own[owed[: len(paid)]], microbatch[owed[: len(paid)]]


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


def breadth_first(owners: tuple[int, ...], ranks: int, microbatches: int, *, train: bool = True) -> Program:
    """What each rank computes, in order; forwards alone if not to `train`."""
    stages = range(len(owners) // ranks)
    row = [forward(own) for own in stages for _ in range(microbatches)]
    if train:
        row += [backward(own) for own in reversed(stages) for _ in range(microbatches)]
    return build_program([row] * ranks, owners, microbatches, newest_first=True)


def forward_only(owners: Sequence[int], microbatches: int) -> Program:
    """
    Microbatches follow one another through the stages, each a stage behind the one before.

    Where a rank holds several stages that are due at once, the one nearest to the end comes first, so that what is
    under way gets done.
    """
    places = [(stage, number) for stage in range(len(owners)) for number in range(microbatches)]
    places.sort(key=lambda place: (place[0] + place[1], -place[0]))
    lines: list[list[Action]] = [[] for _ in range(max(owners) + 1)]
    for stage, number in places:
        lines[owners[stage]].append(Action(stage, "F", number))
    return Program.of(lines, owners)
