"""The loss on data that is never learned from."""

from typing import Any

import attrs
import pytest
import torch

from drawloom.components.phases.evaluate import Evaluate
from drawloom.components.ports.pipeline import Losses
from drawloom.components.ports.run import Step


@attrs.define
class Model:
    """Held-out data and an executor that gives fixed sums."""

    total: float
    weight: float

    def batches(self) -> Any:
        return iter(())

    def train(self, microbatches: Any) -> Losses:
        raise AssertionError("evaluation must not train")

    def evaluate(self, microbatches: Any) -> Losses:
        return Losses(*torch.tensor([self.total, self.weight], dtype=torch.float64))


def measured(model: Model, mesh: Any, every: Any, step: Step) -> Step:
    """The step after the phase."""
    Evaluate(data=model, executor=model, mesh=mesh, every=every).run_phase(step)
    return step


@pytest.mark.parametrize(
    ("every", "index", "due"), [(5, 5, True), (5, 6, False), (5, 7, True), ("last", 5, False), ("never", 7, False)]
)
def test_the_mean_by_token_is_left_when_it_is_due(every: Any, index: int, due: bool, one_rank: Any) -> None:
    """Every n steps and after the last, the sum of losses over the sum of weights; otherwise nothing."""
    values = measured(Model(6.0, 4.0), one_rank, every, Step(index, 7)).outputs
    assert values == ({"validation_loss": 1.5} if due else {})


def test_the_time_it_takes_is_not_learning(one_rank: Any) -> None:
    """Its seconds are set aside, so that tokens per second are those of learning."""
    assert measured(Model(6.0, 4.0), one_rank, 1, Step(1, 7)).excluded_seconds > 0


def test_no_held_out_token_is_no_loss(one_rank: Any) -> None:
    """An empty split leaves nothing rather than a division by zero."""
    assert measured(Model(0.0, 0.0), one_rank, 1, Step(1, 7)).outputs == {}
