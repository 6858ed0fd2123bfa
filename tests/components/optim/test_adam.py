"""Adam beside torch's."""

from typing import Any

import torch

from drawloom.components.optim.adam import Adam
from drawloom.components.ports.run import Step
from support.checkpoints import SingleRankMesh
from support.weights import Weights


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
