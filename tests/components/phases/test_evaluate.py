"""The loss on the validation split."""

from typing import Any

import attrs
import pytest
import torch

from drawloom.components.phases.evaluate import Evaluate
from drawloom.components.ports.run import Step, compute_seconds_between
from drawloom.components.state.step_state import StepState
from support.doubles import Machine
from support.steps import losses_of, values_of


@attrs.define
class Model:
    """Validation data, and an executor with fixed sums."""

    total: float
    weight: float
    cross_entropy: float | None = None

    def count_evaluated_and_total_rows(self) -> tuple[int, int]:
        return 0, 0

    def batches(self) -> Any:
        return iter(())

    def run_forward_and_backward(self, state: StepState) -> None:
        raise AssertionError("evaluation must not train")

    def evaluate(self, state: StepState) -> None:
        sums = {} if self.cross_entropy is None else {"cross_entropy": torch.tensor([self.cross_entropy])}
        state["losses"] = losses_of(self.total, self.weight) | {"sums": sums}


def run_phase(model: Any, mesh: Any, every: Any, step: Step) -> Step:
    """Return the step after the phase."""
    Evaluate(data=model, executor=model, mesh=mesh, device=Machine(), every=every).run_phase(step)
    return step


@pytest.mark.parametrize(
    ("every", "index", "due"), [(5, 5, True), (5, 6, False), (5, 7, True), ("last", 5, False), ("never", 7, False)]
)
def test_the_mean_per_token_is_written_at_the_cadence(every: Any, index: int, due: bool, one_rank: Any) -> None:
    """Every n steps and after the last it is the sum of losses over the sum of weights; otherwise it is absent."""
    step = run_phase(Model(6.0, 4.0), one_rank, every, Step(index, 7))
    assert values_of(step) == ({"validation_loss": 1.5} if due else {})


@pytest.mark.parametrize(
    ("settings", "done", "has_loss"),
    [
        ({"at_start": True, "every": 5}, 0, True),
        ({"at_start": True, "every": "last"}, 0, True),
        ({"at_start": True, "every": 5}, 3, False),
        ({"at_start": True, "every": "never"}, 0, False),
        ({"at_start": False, "every": 5}, 0, False),
    ],
)
def test_a_new_run_evaluates_before_its_first_step(
    settings: dict[str, Any], done: int, has_loss: bool, one_rank: Any
) -> None:
    """Only its first step has the loss, and a resumed run has none; `never` leaves this evaluation out, too."""
    model: Any = Model(6.0, 4.0)
    phase, steps = (
        Evaluate(data=model, executor=model, mesh=one_rank, device=Machine(), **settings),
        [Step(done + 1, 9), Step(done + 2, 9)],
    )
    phase.after_restore(done)
    model.total = 0.0  # what the first step changes must not count
    for step in steps:
        phase.run_phase(step)
    assert [values_of(step).get("initial_validation_loss") for step in steps] == [1.5 if has_loss else None, None]


def test_the_cross_entropy_has_its_own_mean(one_rank: Any) -> None:
    """It is the loss's named sum by token, for perplexity; the loss may have label smoothing and other parts."""
    values = values_of(run_phase(Model(6.0, 4.0, cross_entropy=5.0), one_rank, 1, Step(1, 7)))
    assert values == {"validation_loss": 1.5, "validation_cross_entropy": 1.25}


def test_evaluation_time_is_excluded(one_rank: Any) -> None:
    """Its seconds are excluded, so tokens per second are about training alone."""
    [(start, end)] = run_phase(Model(6.0, 4.0), one_rank, 1, Step(1, 7)).excluded
    assert compute_seconds_between(start, end) >= 0
    assert not run_phase(Model(6.0, 4.0), one_rank, 2, Step(1, 7)).excluded


def test_an_empty_validation_split_has_no_loss(one_rank: Any) -> None:
    """An empty split writes nothing instead of dividing by zero."""
    assert values_of(run_phase(Model(0.0, 0.0), one_rank, 1, Step(1, 7))) == {}
