"""Gradient clipping by total norm."""

import math

import pytest
import torch

from drawloom.components.gradients.clip_norm import ClipNorm
from drawloom.components.ports.run import Step
from support.weights import Weights


def weights_with_gradients() -> Weights:
    """Return two parameters with gradients whose total norm is 5."""
    weights = Weights({"first": (1,), "second": (1,)})
    for (_, parameter), gradient in zip(weights.named_parameters(), (3.0, 4.0), strict=True):
        parameter.grad = torch.tensor([gradient])
    return weights


@pytest.mark.parametrize(("bound", "expected"), [(1.0, (0.6, 0.8)), (10.0, (3.0, 4.0))])
def test_clip_scales_gradients_to_max_norm(bound: float, expected: tuple[float, float]) -> None:
    """Gradients above max_norm are scaled to that norm in the same direction; smaller ones are unchanged."""
    weights, step = weights_with_gradients(), Step(1, 1, {"grad_norm": torch.tensor(5.0, dtype=torch.float64)})
    ClipNorm(parameters=weights, max_norm=bound).run_phase(step)
    assert [float(p.grad) for _, p in weights.named_parameters()] == pytest.approx(expected, rel=1e-6)  # type: ignore[arg-type]
    assert step.state["grad_norm"] == 5.0


@pytest.mark.parametrize(("norm", "factor"), [(math.nan, 1.0), (math.inf, 0.0)])
def test_a_norm_that_is_not_finite_has_a_defined_factor(norm: float, factor: float) -> None:
    """A skipped step's gradients are unchanged, or zero."""
    weights = weights_with_gradients()
    before = [parameter.grad.clone() for _, parameter in weights.named_parameters() if parameter.grad is not None]
    state = {"grad_norm": torch.tensor(norm, dtype=torch.float64)}
    ClipNorm(parameters=weights, max_norm=0.3).run_phase(Step(1, 1, state))
    after = [parameter.grad for _, parameter in weights.named_parameters() if parameter.grad is not None]
    assert all(torch.equal(a, factor * b) for a, b in zip(after, before, strict=True))
