"""What every metric does."""

import math

import torch

from drawloom.components.ports.run import Metric, Step
from drawloom.graph.testing import expect


def _step(index: int) -> Step:
    values = {"loss": torch.tensor(2.0), "grad_norm": torch.tensor(1.0), "lr": 0.1}
    return Step(index, 10, tokens=64, outputs=values)


def it_measures_numbers(metric: Metric) -> None:
    """Each value is a finite number, a boolean, or nothing, under the name of a text."""
    for index in (1, 2, 3):
        for name, value in metric.measure(_step(index)).items():
            expect(isinstance(name, str) and name, f"{name!r} is no name")
            expect(value is None or isinstance(value, int | float), f"{name} is {value!r}")
            expect(value is None or math.isfinite(value), f"{name} is {value}")


def names_stay_the_same(metric: Metric) -> None:
    """Every step is measured under the same names, so that a series has no holes."""
    names = [sorted(metric.measure(_step(index))) for index in (1, 2, 3)]
    expect(names[0] == names[1] == names[2], f"the names change from step to step: {names}")


def it_changes_nothing(metric: Metric) -> None:
    """A step is as it was after it has been measured."""
    step = _step(1)
    before = dict(step.outputs)
    metric.measure(step)
    same = step.outputs.keys() == before.keys() and all(step.outputs[key] is before[key] for key in before)
    expect(same and (step.index, step.tokens, step.skip_reason) == (1, 64, ""), "measuring changed the step")
