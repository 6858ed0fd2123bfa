"""Where the time of a step goes."""

from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import pytest
import torch

from drawloom.components.gradients.clip_norm import ClipNorm
from drawloom.components.gradients.synchronize import Synchronize
from drawloom.components.metrics.phase_times import PhaseTimes
from drawloom.components.optim.sgd import SGD
from drawloom.components.phases.evaluate import Evaluate
from drawloom.components.phases.forward_backward import ForwardBackward
from drawloom.components.ports.run import Event, Interval, Step, mark_time
from drawloom.graph import Every
from support.doubles import Machine

PHASES: dict[str, Any] = {
    "fb": ForwardBackward,
    "sum": Synchronize,
    "clip": ClipNorm,
    "sgd": SGD,
    "evaluate": Evaluate,
}


class GpuEvent:
    """An event of a GPU whose clock goes on by as many milliseconds as there have been events."""

    made = 0
    time = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        GpuEvent.made += 1
        GpuEvent.time += GpuEvent.made
        self.at: float | None = None

    def record(self) -> None:
        self.at = GpuEvent.time

    def synchronize(self) -> None:
        assert self.at is not None

    def elapsed_time(self, other: "GpuEvent") -> float:
        assert self.at is not None and other.at is not None
        return other.at - self.at


def metric(kind: str = "cpu") -> PhaseTimes:
    """Return the metric of some phases."""
    phases = Every({name: object.__new__(phase_class) for name, phase_class in PHASES.items()})
    made = PhaseTimes(device=Machine(torch.device(kind)), phases=phases)
    ticks: Iterator[float] = iter([sum(range(number)) * 1.0 for number in range(1, 99)])  # 1, 2, 3, ... between them
    made.clock = lambda: next(ticks)
    return made


def run(made: PhaseTimes, step: Step) -> None:
    """Run a step up to the end of its measurement."""
    made.on_event(Event("step_started", step))
    start: Any = mark_time(made.device.device, made.clock)
    for name in PHASES:
        made.on_event(Event("phase_started", step, name))
        if name == "fb":
            made.on_event(Event("data_loaded", step))
        made.on_event(Event("phase_ended", step, name))
    made.on_event(Event("phase_started", step, "report"))
    made.measure_on_rank(step)
    step.interval = Interval(start, mark_time(made.device.device, made.clock))
    made.on_event(Event("phase_ended", step, "report"))  # belongs to the next step


def seconds_by_part(made: PhaseTimes, step: Step) -> dict[str, float]:
    """Return the metric's values without their prefix."""
    values: Mapping[str, Any] = made.compute({}, step)
    return {name.removeprefix("seconds/"): value for name, value in values.items()}


# ticks between marks grow by one; the first is before the first phase
EXPECTED = {"other": 1 + 4 + 6 + 8 + 10 + 12, "data": 2, "forward_backward": 3, "sync": 5, "update": 7 + 9}
EXPECTED |= {"evaluate": 11, "report": 13, "step": sum(range(1, 14))}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_times_are_grouped_by_declared_actions_and_add_up_to_the_step(kind: str) -> None:
    """
    Names do not matter: data until it is loaded, sync for gradients, update for all changes of weights. The rest is in
    `other`.
    """
    GpuEvent.made, GpuEvent.time = 0, 0.0
    made, step = metric(kind), Step(1, 9)
    with mock.patch.object(torch.cuda, "Event", GpuEvent):
        run(made, step)
        made.on_event(Event("phase_started", step, "checkpoint"))  # the numbers are read in another phase
        seconds = seconds_by_part(made, step)
    # On a GPU, where the clock of this test begins with 1, differences begin with 2.
    shift, scale = (1, 1e-3) if kind == "cuda" else (0, 1)
    counts = {"other": 6, "update": 2, "step": 13}
    assert seconds == pytest.approx(
        {name: (value + shift * counts.get(name, 1)) * scale for name, value in EXPECTED.items()}
    )
    assert sum(seconds.values()) == pytest.approx(2 * seconds["step"])


def test_phases_after_the_report_belong_to_the_next_step() -> None:
    """A save's seconds are in the next step and excluded there; after a step that goes back, time starts anew."""
    made, step = metric(), Step(1, 9)
    run(made, step)
    made.on_event(Event("phase_started", step, "checkpoint"))
    made.on_event(Event("phase_ended", step, "checkpoint"))
    assert step.interval is not None
    after = Step(2, 9, goes_back=True)
    start = step.interval.end
    run(made, after)
    assert after.interval is not None
    after.interval = Interval(start, after.interval.end, [(0.0, 4.0)])
    parts = seconds_by_part(made, after)
    total, excluded = parts.pop("step"), parts.pop("excluded")
    assert parts.keys() == {*EXPECTED, "checkpoint"} - {"step"}
    assert (sum(parts.values()), excluded) == (total, 4.0)
    again = Step(3, 9)
    run(made, again)
    seconds = seconds_by_part(made, again)
    assert seconds.keys() == EXPECTED.keys() and all(value > 0 for value in seconds.values())
