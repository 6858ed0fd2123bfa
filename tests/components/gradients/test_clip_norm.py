"""Gradient clipping by total norm."""

import math

import pytest
import torch

from drawloom.components.gradients.clip_norm import ClipNorm
from drawloom.components.ports.run import Step
from support.weights import Weights


def weights_with_gradients() -> Weights:
    """Two parameters with gradients whose total norm is 5."""
    weights = Weights({"first": (1,), "second": (1,)})
    for (_, parameter), gradient in zip(weights.named(), (3.0, 4.0), strict=True):
        parameter.grad = torch.tensor([gradient])
    return weights


@pytest.mark.parametrize("norm", [5.0, torch.tensor(5.0, dtype=torch.float64)], ids=["known", "on the device"])
@pytest.mark.parametrize(("bound", "expected"), [(1.0, (0.6, 0.8)), (10.0, (3.0, 4.0))])
def test_clip_scales_gradients_to_max_norm(bound: float, expected: tuple[float, float], norm: float) -> None:
    """Gradients above max_norm keep their direction and get that norm; those below are unchanged."""
    weights, step = weights_with_gradients(), Step(1, 1, outputs={"grad_norm": norm})
    ClipNorm(parameters=weights, max_norm=bound).run_phase(step)
    assert [float(p.grad) for _, p in weights.named()] == pytest.approx(expected, rel=1e-6)  # type: ignore[arg-type]
    assert step.outputs["grad_norm"] == 5.0


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_on_the_device_clips_like_a_known_one(norm: float) -> None:
    """The gradients of a step that is skipped anyway are the same, to the bit."""
    sides = weights_with_gradients(), weights_with_gradients()
    for weights, given in zip(sides, (norm, torch.tensor(norm, dtype=torch.float64)), strict=True):
        ClipNorm(parameters=weights, max_norm=0.3).run_phase(Step(1, 1, outputs={"grad_norm": given}))
    ours, theirs = ([parameter.grad for _, parameter in side.named()] for side in sides)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))  # type: ignore[arg-type]
