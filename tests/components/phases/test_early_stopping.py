"""The end of runs whose metric no longer improves."""

import math
from typing import Any

import pytest

from drawloom.components.phases.early_stopping import EarlyStopping
from drawloom.components.ports.run import Step


def train(phase: EarlyStopping, *values: float | None, first: int = 1) -> int:
    """Run steps with these validation losses, None for none; return the last step of the run, or 0."""
    for index, value in enumerate(values, first):
        step = Step(index, 99, {} if value is None else {"validation_loss": value})
        phase.run_phase(step)
        if step.stop_reason:
            assert step.is_last
            return index
    return 0


@pytest.mark.parametrize(
    ("settings", "values", "ended"),
    [
        ({"patience": 2}, [3.0, 2.0, 2.5, 1.9, 2.0, 1.9, 1.0], 6),
        ({"patience": 2}, [3.0, None, 3.1, None, None, 2.9, 3.0], 0),
        ({"patience": 2, "min_change": 0.5}, [3.0, 2.6, 2.5, 2.1, 2.1, 1.0], 5),
        ({"patience": 2, "best_is": "highest"}, [0.5, 0.6, 0.6, 0.1], 4),
        ({"patience": 2}, [math.nan, math.inf, 1.0], 2),
        ({"patience": 1}, [1.0, math.nan], 2),
        ({"patience": 1, "metric": "other"}, [1.0, 2.0], 0),
    ],
)
def test_a_run_ends_after_as_many_values_without_improvement(
    settings: dict[str, Any], values: list[float | None], ended: int
) -> None:
    """Steps without the metric do not count; small changes, equal and non-finite values are no improvements."""
    assert train(EarlyStopping(**settings), *values) == ended


def test_the_reason_names_the_best_value() -> None:
    """It tells the metric, its best value and step, and how often it did not improve."""
    phase = EarlyStopping(patience=2)
    train(phase, 3.0, 2.0, 2.5, 2.25)
    assert phase.stop_reason() == "validation_loss was 2.0000 after step 2, and did not improve 2 times in a row"


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_resumed_run_ends_at_the_same_step(cut: int) -> None:
    """A checkpoint after any step continues the count; an ended run goes on with more patience alone."""
    values = [3.0, 2.0, 2.5, 2.25, 2.75]
    phase = EarlyStopping(patience=3)
    assert train(phase, *values[:cut]) == 0
    resumed = EarlyStopping(patience=3)
    resumed.load_state_dict(phase.state_dict())
    assert resumed.stop_reason() == "" and train(resumed, *values[cut:], first=cut + 1) == 5
    for patience, is_over in ((3, True), (4, False)):
        again = EarlyStopping(patience=patience)
        again.load_state_dict(resumed.state_dict())
        assert bool(again.stop_reason()) == is_over
