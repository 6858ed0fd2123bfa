"""Where the time of a step goes."""

from collections.abc import Iterator
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
from drawloom.components.ports.run import Event, Step
from drawloom.graph import Every
from support.doubles import Machine
from support.metrics import measure

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
    """Run a step up to the measuring phase."""
    made.on_event(Event("step_started", step))
    for name in PHASES:
        made.on_event(Event("phase_started", step, name))
        if name == "fb":
            made.on_event(Event("data_loaded", step))
        made.on_event(Event("phase_ended", step, name))
    made.on_event(Event("phase_started", step, "report"))


EXPECTED = {"data": 1, "forward_backward": 2, "sync": 4, "update": 6 + 8, "evaluate": 10}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_times_are_grouped_by_declared_actions(kind: str) -> None:
    """Names do not matter: data until it is loaded, sync for gradients, update for all changes of weights."""
    GpuEvent.made, GpuEvent.time = 0, 0.0
    made, step = metric(kind), Step(1, 9)
    scale = 1e-3 if kind == "cuda" else 1.0
    with mock.patch.object(torch.cuda, "Event", GpuEvent):
        run(made, step)
        parts = made.measure_on_rank(step)
        made.on_event(Event("phase_ended", step, "report"))  # later than what is measured
        seconds = made.compute(parts, step)
    # On a GPU, where the clock of this test begins with 1, differences begin with 2.
    shift = scale if kind == "cuda" else 0.0
    counts = {"update": 2}
    assert seconds == pytest.approx(
        {f"seconds/{name}": value * scale + shift * counts.get(name, 1) for name, value in EXPECTED.items()}
    )


def test_each_step_is_measured_by_itself() -> None:
    """The second step's times are not added to the first's."""
    made = metric()
    for number in (1, 2):
        step = Step(number, 9)
        run(made, step)
        seconds = measure(made, step)
    ticks = 12  # between two marks in the step before
    assert seconds["seconds/data"] == ticks + 1
    assert seconds.keys() == {f"seconds/{name}" for name in EXPECTED}
