"""The loss as a number of choices."""

import math
from typing import Any

import pytest

from drawloom.components.metrics.perplexity import Perplexity
from support.metrics import measure, step_of


def test_perplexity_is_exp_of_the_mean_over_all_tokens() -> None:
    """It is not the mean of exps: ranks with different losses have one perplexity."""
    first = step_of([0.0], [1.0], {"cross_entropy": [math.log(2.0)]})
    second = step_of([0.0], [3.0], {"cross_entropy": [3 * math.log(32.0)]})
    assert measure(Perplexity(), first, second) == {"perplexity": pytest.approx(16.0)}


def test_validation_perplexity_is_exp_of_the_cross_entropy() -> None:
    """It is not exp of the validation loss, and a loss without cross entropy has none."""
    values: Any = {"validation_loss": 7.0, "validation_cross_entropy": math.log(5.0)}
    step = step_of([0.0], [1.0], {"cross_entropy": [0.0]}, **values)
    assert measure(Perplexity(), step) == {"perplexity": 1.0, "validation_perplexity": pytest.approx(5.0)}
    other = step_of([0.0], [1.0], {"cross_entropy": [0.0]}, validation_loss=7.0)
    assert measure(Perplexity(), other) == {"perplexity": 1.0}


@pytest.mark.parametrize("total", [float("nan"), float("inf"), 1e6])
def test_an_overflow_is_none(total: float) -> None:
    """A diverged loss does not end the run."""
    assert measure(Perplexity(), step_of([0.0], [1.0], {"cross_entropy": [total]})) == {"perplexity": None}
