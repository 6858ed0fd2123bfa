"""Gradient clipping by total norm."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from drawloom.components.gradients.clip_norm import ClipNorm
from drawloom.components.ports.run import Step


class Weights:
    """Two parameters with gradients whose total norm is 5."""

    def __init__(self) -> None:
        self.parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
        for parameter, gradient in zip(self.parameters, (3.0, 4.0), strict=True):
            parameter.grad = torch.tensor([gradient])

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [(str(number), parameter) for number, parameter in enumerate(self.parameters)]

    def slices(self) -> dict[str, Any]:
        return dict.fromkeys(name for name, _ in self.named())


@pytest.mark.parametrize(("bound", "expected"), [(1.0, (0.6, 0.8)), (10.0, (3.0, 4.0))])
def test_clip_scales_gradients_to_max_norm(bound: float, expected: tuple[float, float]) -> None:
    """Gradients above max_norm keep their direction and get that norm; those below are unchanged."""
    weights, step = Weights(), Step(1, 1, {"grad_norm": torch.tensor(5.0, dtype=torch.float64)})
    ClipNorm(parameters=weights, max_norm=bound).run_phase(step)
    assert [float(p.grad) for p in weights.parameters] == pytest.approx(expected, rel=1e-6)  # type: ignore[arg-type]
    assert step.state["grad_norm"] == 5.0


@pytest.mark.parametrize(("norm", "factor"), [(math.nan, 1.0), (math.inf, 0.0)])
def test_a_norm_that_is_not_finite_has_a_defined_factor(norm: float, factor: float) -> None:
    """The gradients of a step that is skipped are left as they are, or zero."""
    weights = Weights()
    before = [parameter.grad.clone() for parameter in weights.parameters if parameter.grad is not None]
    state = {"grad_norm": torch.tensor(norm, dtype=torch.float64)}
    ClipNorm(parameters=weights, max_norm=0.3).run_phase(Step(1, 1, state))
    after = [parameter.grad for parameter in weights.parameters if parameter.grad is not None]
    assert all(torch.equal(a, factor * b) for a, b in zip(after, before, strict=True))
