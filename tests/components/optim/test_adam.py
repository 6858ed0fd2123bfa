"""Adam beside torch's."""

from typing import Any

import torch
from torch import nn

from drawloom.components.optim.adam import Adam
from drawloom.components.ports.run import Step
from support.checkpoints import SingleRankMesh


class Weights:
    """A matrix and a vector to train."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = {
            "matrix": nn.Parameter(torch.randn(3, 4, generator=generator)),
            "vector": nn.Parameter(torch.randn(4, generator=generator)),
        }

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.parameters.items())

    def slices(self) -> dict[str, Any]:
        return dict.fromkeys(self.parameters)

    def give_gradients(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _, parameter in self.named():
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_steps_are_those_of_torch() -> None:
    """Weights are bitwise torch.optim.Adam's, whose weight decay is a part of the gradient; the vector has none."""
    ours, theirs = Weights(), Weights()
    optimizer = Adam(parameters=ours, mesh=SingleRankMesh(), lr=0.1, weight_decay=0.5)
    optimizer.open()
    matrix, vector = theirs.parameters.values()
    groups: list[dict[str, Any]] = [{"params": [matrix], "weight_decay": 0.5}, {"params": [vector]}]
    adam = torch.optim.Adam(groups, lr=0.1, betas=(0.9, 0.999), eps=1e-8, fused=True)
    for number in (1, 2):
        ours.give_gradients(number)
        theirs.give_gradients(number)
        optimizer.run_phase(Step(number, 2))
        adam.step()
    for name, parameter in ours.named():
        assert torch.equal(parameter, theirs.parameters[name]), name
