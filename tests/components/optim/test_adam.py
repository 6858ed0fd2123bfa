"""Adam and AdamW beside torch's."""

from typing import Any

import pytest
import torch

from drawloom.components.optim.adam import Adam
from drawloom.components.optim.adamw import AdamW
from drawloom.components.ports.run import Step
from support.checkpoints import SingleRankMesh
from support.weights import Weights


@pytest.mark.parametrize("variant", [{}, {"amsgrad": True}, {"maximize": True}, {"amsgrad": True, "maximize": True}])
@pytest.mark.parametrize(
    ("kind", "torch_kind", "betas"),
    [(Adam, torch.optim.Adam, (0.9, 0.999)), (AdamW, torch.optim.AdamW, (0.9, 0.95))],
)
def test_steps_equal_those_of_torch(kind: Any, torch_kind: Any, betas: tuple[float, float], variant: Any) -> None:
    """Weights are bitwise equal to torch's with the same options; the vector does not decay."""
    ours, theirs = Weights(), Weights()
    optimizer = kind(parameters=ours, mesh=SingleRankMesh(), lr=0.1, weight_decay=0.5, **variant)
    optimizer.open()
    matrix, vector = theirs.parameters.values()
    groups: list[dict[str, Any]] = [
        {"params": [matrix], "weight_decay": 0.5},
        {"params": [vector], "weight_decay": 0.0},
    ]
    adam = torch_kind(groups, lr=0.1, betas=betas, eps=1e-8, fused=True, **variant)
    for number in (1, 2, 3):
        ours.give_gradients(number)
        theirs.give_gradients(number)
        optimizer.run_phase(Step(number, 3))
        adam.step()
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, theirs.parameters[name]), name
