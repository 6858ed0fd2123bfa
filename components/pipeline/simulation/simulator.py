"""A program carried out on paper: how long it takes, how much of that is idle, and what each rank holds."""

from collections.abc import Iterator

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.components.pipeline.program.costs import Costs
from drawloom.components.pipeline.program.lowering import with_messages
from drawloom.components.pipeline.program.timing import time
from drawloom.components.pipeline.simulation.contention import Channels, Event, Name, name, run_events
from drawloom.components.ports.program import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    OPS,
    Action,
    Program,
    RankProgram,
    flat,
)


@attrs.frozen
class Bar:
    """An action on a timeline, and whether it overlaps the one before it."""

    action: Action
    start: float
    end: float
    overlaps_previous: bool


@attrs.frozen(eq=False)
class Simulation:
    """What became of a program: when each of its actions starts and ends."""

    program: Program
    costs: Costs
    channels: Channels
    start: NDArray[np.float64]
    end: NDArray[np.float64]

    def line(self, rank: int) -> Iterator["Bar"]:
        """What a rank does, in order."""
        for row in range(*self.program.bounds[rank : rank + 2]):
            action, joined = self.program.action(row), bool(self.program.overlaps_previous[row])
            yield Bar(action, float(self.start[row]), float(self.end[row]), joined)

    @property
    def makespan(self) -> float:
        """From the first start to the last end: a step, if all ranks begin and end it together."""
        return float(self.end.max(initial=0.0))

    @property
    def ideal(self) -> float:
        """The work of the busiest rank: no step is shorter."""
        length = self.end - self.start
        return max(float(length[self.program.rows(rank)].sum()) for rank in range(self.program.ranks))

    @property
    def bubble(self) -> float:
        """The idle share of the makespan."""
        return _idle(self.ideal, self.makespan)

    @property
    def span(self) -> float:
        """The longest time from a rank's own first start to its own last end: a step, if steps may overlap."""
        rows = [self.program.rows(rank) for rank in range(self.program.ranks)]
        return max((float(self.end[r].max() - self.start[r].min()) for r in rows if r.start < r.stop), default=0.0)

    @property
    def span_bubble(self) -> float:
        """The idle share of the span."""
        return _idle(self.ideal, self.span)

    @property
    def peak_activations(self) -> list[int]:
        """By rank, the most stage-microbatches between their forward and their (input) gradients."""
        return self._peaks(FORWARD, BACKWARD, BACKWARD_INPUT)

    @property
    def peak_live_weights(self) -> list[int]:
        """By rank, the most stage-microbatches between their forward and their weight gradients."""
        return self._peaks(FORWARD, BACKWARD, BACKWARD_WEIGHT)

    @property
    def peak_pending_weight_grads(self) -> list[int]:
        """By rank, the most weight gradients that are still to be done after their input gradients."""
        return self._peaks(BACKWARD_INPUT, BACKWARD_WEIGHT)

    @property
    def peak_boundary(self) -> list[int]:
        """By rank, the most tensors that are being sent, or that are waited for or received and not used yet."""
        lines = _lines(self.program, self.costs)
        events = run_events(lines, self.costs, self.channels)
        return [_peak_boundary(line, events) for line in lines]

    def _peaks(self, opening: int, *closing: int) -> list[int]:
        if not np.isin(self.program.op, closing).any():
            return [0] * self.program.ranks  # nothing is kept for what never comes
        change = (self.program.op == opening).astype(np.int64) - np.isin(self.program.op, closing)
        lines = (change[self.program.rows(rank)] for rank in range(self.program.ranks))
        return [int(line.cumsum().max(initial=0)) for line in lines]

    @property
    def actions(self) -> dict[str, int]:
        """How many actions there are of each kind of work."""
        return {work: int((self.program.op == number).sum()) for number, work in enumerate(OPS)}


def simulate(program: Program, costs: Costs, channels: Channels = "free") -> Simulation:
    """Carry a program out on paper; raises Stuck if it can't be."""
    if channels == "free":
        timing = time(program, costs)
        return Simulation(program, costs, channels, timing.start, timing.end)
    events = run_events(_lines(program, costs), costs, channels)
    rows = [events[name(program.action(row))] for row in range(len(program.stage))]
    start, end = (np.array([getattr(event, edge) for event in rows]) for edge in ("start", "end"))
    return Simulation(program, costs, channels, start, end)


def _lines(program: Program, costs: Costs) -> list[RankProgram]:
    """Every rank's line with its messages, laid in order for these costs."""
    timing = time(program, costs)
    return [with_messages(program, timing, rank) for rank in range(program.ranks)]


def _peak_boundary(line: RankProgram, events: dict[Name, Event]) -> int:
    peak, now = 0, 0.0
    sent: list[float] = []
    received: set[tuple[int, bool, int]] = set()
    for action in flat(line):
        place = action.stage, action.op.endswith("F"), action.microbatch
        if action.op in OPS:
            received.discard(place)
            now = events[name(action)].end
        sent = [end for end in sent if end > now]
        if action.op.startswith("SEND"):
            sent.append(events[name(action)].end)
        elif action.op.startswith("RECV"):
            received.add(place)
        peak = max(peak, len(sent) + len(received))
    return peak


def _idle(busy: float, length: float) -> float:
    return 1 - busy / length if length else 0.0
