"""The forward and backward phase."""

from typing import Any

import torch

from drawloom.components.phases.forward_backward import ForwardBackward
from drawloom.components.ports.data import Batch
from drawloom.components.ports.run import Step


class Parts:
    """Data of two microbatches, and an executor that counts them."""

    def next_step(self) -> list[Batch]:
        row = torch.zeros(2, 3, dtype=torch.int64)
        return [Batch(row, row, row, row, row.float(), padding=2), Batch(row, row, row, row, row.float())]

    def train(self, microbatches: Any) -> Any:
        return len(microbatches)

    def evaluate(self, microbatches: Any) -> Any:
        raise AssertionError("training must not evaluate")


def test_all_microbatches_of_the_step_are_trained_on() -> None:
    """The executor gets the step's microbatches; its losses are written, and how many tokens are no padding."""
    step = Step(1, 1)
    ForwardBackward(data=Parts(), executor=Parts()).run_phase(step)
    assert step.outputs["losses"] == len(step.outputs["batches"]) == 2 and step.tokens == 10
