"""Gradient clipping by value."""

import torch
from torch import nn

from drawloom.components.gradients.clip_value import ClipValue
from drawloom.components.ports.run import Step
from support.weights import Weights


def test_elements_are_clamped() -> None:
    """Only elements beyond max_value change, and they keep their sign."""
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([-3.0, 0.5, 2.0])
    ClipValue(parameters=Weights.from_parameters({"weight": weight}), max_value=1.0).run_phase(Step(1, 1))
    assert weight.grad.tolist() == [-1.0, 0.5, 1.0]
