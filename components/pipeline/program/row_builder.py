"""
Programs from rows of letters, as in the figures of papers: what comes when is written, which microbatch is counted.

A letter names work on one of a rank's own stages, counted from 0: `F1` is the next forward of its second stage. The
n-th F1 in a row is microbatch n, and so is its n-th backward, be it B1 or I1. The n-th W1 belongs to the n-th I1, and
the n-th W to the n-th I of any stage, which makes a queue of the weight gradients that are still owed. A row may be
written for more microbatches than there are: what is too much is left out, which can't break what depends on what.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drawloom.components.ports.program import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Program

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
