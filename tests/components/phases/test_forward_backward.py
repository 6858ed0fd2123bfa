"""The forward and backward phase."""

import torch

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


def test_all_microbatches_of_the_step_are_trained_on() -> None:
    """The executor sees the step's batches one by one, after the event for loaded data."""
    step, events = Step(1, 1), list[Event]()
    ForwardBackward(data=Parts(), executor=Parts(), events=fake(Events, emit=events.append)).run_phase(step)
    assert step.state["losses"] == [4, 6] and len(step.state["batches"]) == 2
    assert [(event.kind, event.step) for event in events] == [("data_loaded", step)]
