"""Gradient clipping by value."""

import torch
from torch import nn

from drawloom.components.gradients.clip_value import ClipValue
from drawloom.components.ports.run import Step
from support.weights import Weights


def weights_with_gradient() -> Weights:
    """One parameter with a gradient."""
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([-3.0, 0.5, 2.0])
    return Weights.of({"weight": parameter})


def test_elements_are_clamped() -> None:
    """Only elements beyond max_value change, and they keep their sign."""
    weights = weights_with_gradient()
    ClipValue(parameters=weights, max_value=1.0).run_phase(Step(1, 1))
    gradient = weights.parameters["weight"].grad
    assert gradient is not None
    assert gradient.tolist() == [-1.0, 0.5, 1.0]
