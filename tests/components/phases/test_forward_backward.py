"""The forward and backward phase."""

from typing import Any

import torch
from torch import nn

from drawloom.components.phases.forward_backward import ForwardBackward
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.run import Event, Events, Step
from drawloom.components.state.batch import Batch
from drawloom.components.state.step_state import StepState
from drawloom.graph.testing import fake


class Parts:
    """Data with two microbatches, and an executor that counts them."""

    def next_step(self) -> list[Batch]:
        row = torch.zeros(2, 3, dtype=torch.int64)
        padding = torch.tensor([[False, False, True]] * 2)
        batch = TokenBatch(row, row, row, row, row.float())
        return [batch.evolve(padding=padding), batch]

    def run_forward_and_backward(self, state: StepState) -> None:
        for number in range(state.microbatches):
            view = state.microbatch(number)
            view["losses"] = view["batches"].token_count

    def evaluate(self, state: StepState) -> None:
        raise AssertionError("training must not evaluate")


class RandomParts(Parts):
    """
    The same, with random gradients of one parameter. It observes passes and has too little room in the first two, like
    an observer and a dispatcher.
    """

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.zeros(()))
        self.passes, self.observed, self.draws = 0, 0, list[float]()

    def run_forward_and_backward(self, state: StepState) -> None:
        super().run_forward_and_backward(state)
        assert self.weight.grad is None and self.observed == 0
        self.weight.grad = torch.rand(())
        self.passes, self.observed = self.passes + 1, 1
        self.draws.append(float(self.weight.grad))

    graph_values: object = None

    def grow_if_rows_were_dropped(self) -> bool:
        return self.passes < 3

    def forget_passes(self) -> None:
        self.observed = 0

    def sum_remaining_gradients(self) -> None:
        assert self.weight.grad is not None

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [("weight", self.weight)]


def _make_phase(parts: Parts, events: Events) -> ForwardBackward:
    part: Any = parts
    return ForwardBackward(data=part, executor=part, parameters=part, events=events)


def test_passes_with_too_little_room_leave_nothing_behind() -> None:
    """They are repeated with the same random numbers, without earlier gradients, losses and observed values."""
    parts, step = RandomParts(), Step(1, 1)
    phase = _make_phase(parts, fake(Events))
    phase.limits["dispatcher"] = phase.observers["metric"] = parts
    phase.run_phase(step)
    assert parts.passes == 3 and len({*parts.draws}) == 1
    assert parts.observed == 1 and parts.weight.grad is not None and step.state["losses"] == [4, 6]


def test_all_microbatches_of_the_step_are_trained_on() -> None:
    """The executor sees the step's batches one by one, after the event for loaded data."""
    step, events = Step(1, 1), list[Event]()
    _make_phase(Parts(), fake(Events, emit=events.append)).run_phase(step)
    assert step.state["losses"] == [4, 6] and len(step.state["batches"]) == 2
    assert [(event.kind, event.step) for event in events] == [("data_loaded", step)]
