"""
When each action starts and ends, if every rank goes through its line as fast as what it depends on lets it.

This is the longest path through the graph of actions. All ranks advance together, one action a sweep: a rank's next
action starts when the rank is free and what it takes has been made, and if that is not so yet, the rank sits the sweep
out. The number of sweeps is the depth of the graph, and each is a handful of operations on one number for each rank.
"""

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.components.pipeline.program.costs import Costs
from drawloom.components.ports.program import BACKWARD_WEIGHT, FORWARD, Program


class Deadlock(Exception):
    """A program can't be carried out: every rank that is left waits for another."""


@attrs.frozen(eq=False)
class Timing:
    """For each action of a program: when it starts and ends, and in which sweep it came, later than all it needs."""

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    wave: NDArray[np.int64]

    @property
    def makespan(self) -> float:
        """When the last action ends."""
        return float(self.end.max(initial=0.0))


def time(program: Program, costs: Costs) -> Timing:
    """Times of each action with messages that take `costs.message` each, any number of them at once; or Stuck."""
    made, takes, delay = dependencies(program, costs)
    ends = np.full(made.max(initial=0) + 1, np.inf)
    ends[_NOTHING] = 0.0
    length, place, free = costs.of(program.op), program.bounds[:-1].copy(), np.zeros(program.ranks)
    timing = Timing(np.zeros(len(made)), np.zeros(len(made)), np.zeros(len(made), dtype=np.int64))
    number = 0
    while len(ranks := np.flatnonzero(place < program.bounds[1:])):
        ready = ends[takes[place[ranks]]] + delay[place[ranks]]
        able = ready < np.inf
        if not able.any():
            raise Deadlock(_stuck(program, place[ranks]))
        ranks = ranks[able]
        now = place[ranks]
        start = np.maximum(free[ranks], ready[able])
        end = start + length[now]
        timing.start[now], timing.end[now], timing.wave[now] = start, end, number
        free[ranks] = ends[made[now]] = end
        place[ranks] += 1
        number += 1
    return timing


_NOTHING = 0
"""Where the end of what needs no waiting for is kept."""


def dependencies(program: Program, costs: Costs) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """
    For each action the cell in which it leaves its end, the cell with the end of what it takes, and how long that
    travels. Cell 0 is for actions that take nothing, the last one for ends that nobody asks for.
    """
    stage, work, last = program.stage, program.op, program.stages - 1
    forward, weight = work == FORWARD, work == BACKWARD_WEIGHT
    direction = np.where(forward, 1, -1)
    size = program.stages * program.microbatches
    cell = 1 + stage * program.microbatches + program.microbatch
    made = np.where(forward, cell, np.where(weight, 1 + 2 * size, cell + size))
    takes = made - direction * program.microbatches
    takes[~forward & (stage == last)] = cell[~forward & (stage == last)]
    takes[weight | (forward & (stage == 0))] = _NOTHING
    owners = np.array(program.stage_to_rank)
    source = np.clip(stage - direction, 0, last)
    delay = np.where(owners[source] != owners[stage], costs.comm, 0.0)
    delay[takes == _NOTHING] = 0.0
    return made, takes, delay


def _stuck(program: Program, places: NDArray[np.int64]) -> str:
    ranks = np.searchsorted(program.bounds, places, side="right") - 1
    waiting = [f"rank {rank} waits to do {program.action(place)}" for rank, place in zip(ranks, places, strict=True)]
    return "no rank can go on: " + ", ".join(waiting[:8]) + (", ..." if len(waiting) > 8 else "")
