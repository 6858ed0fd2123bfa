"""Gradient clipping by value."""

from typing import Any

import torch
from torch import nn

from drawloom.components.gradients.clip_value import ClipValue
from drawloom.components.ports.run import Step


class Weights:
    """One parameter with a gradient."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.zeros(3))
        self.parameter.grad = torch.tensor([-3.0, 0.5, 2.0])

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [("weight", self.parameter)]

    def slices(self) -> dict[str, Any]:
        return dict.fromkeys(name for name, _ in self.named())


def test_elements_are_clamped() -> None:
    """Only elements beyond max_value change, and they keep their sign."""
    weights = Weights()
    ClipValue(parameters=weights, max_value=1.0).run_phase(Step(1, 1))
    assert weights.parameter.grad is not None
    assert weights.parameter.grad.tolist() == [-1.0, 0.5, 1.0]
