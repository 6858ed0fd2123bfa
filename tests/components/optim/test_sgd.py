"""SGD with momentum."""

from typing import Any

import torch
from torch import nn

from drawloom.components.optim.sgd import SGD
from drawloom.components.ports.run import Step
from support.checkpoints import SingleRankMesh


class Weight:
    """One weight."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(1, 1))

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [("weight", self.weight)]

    def slices(self) -> dict[str, Any]:
        return dict.fromkeys(name for name, _ in self.named())


def test_momentum_adds_up_gradients() -> None:
    """Two equal gradients move the weight by lr * g * (1 + 1 + momentum)."""
    parameters = Weight()
    sgd = SGD(parameters=parameters, mesh=SingleRankMesh(), lr=0.1, momentum=0.5)
    sgd.open()
    for number in (1, 2):
        parameters.weight.grad = torch.ones(1, 1)
        sgd.run_phase(Step(number, 2))
    torch.testing.assert_close(parameters.weight.detach(), torch.full((1, 1), 1 - 0.1 * 2.5))
