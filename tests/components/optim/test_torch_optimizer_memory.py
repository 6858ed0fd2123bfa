"""Memory reported by optimizers."""

from typing import Any

import pytest
import torch
from torch import nn

from drawloom.components.optim.adam import Adam
from drawloom.components.optim.adamw import AdamW
from drawloom.components.optim.muon import Muon
from drawloom.components.optim.sgd import SGD
from drawloom.components.ports.run import Step
from support.checkpoints import SingleRankMesh
from support.weights import Weights


def two_dtype_weights() -> Weights:
    """Return a matrix in bfloat16 and a vector in float32."""
    matrix, vector = torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(4)
    return Weights.from_parameters({"matrix": nn.Parameter(matrix), "vector": nn.Parameter(vector)})


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (AdamW, {}),
        (Adam, {}),
        (AdamW, {"amsgrad": True}),
        (Muon, {"targets": ["matrix"]}),
        (SGD, {"momentum": 0.9}),
        (SGD, {"momentum": 0.0}),
    ],
)
def test_the_state_takes_the_bytes_that_were_announced(kind: Any, settings: Any) -> None:
    """
    The bytes announced before the first step equal the state's bytes after it, without step counters; the forecast has
    all the state's tensors.
    """
    weights = two_dtype_weights()
    optimizer = kind(parameters=weights, mesh=SingleRankMesh(), lr=0.1, **settings)
    optimizer.open()
    announced, forecast = optimizer.device_bytes(), optimizer.forecast_state_after_first_step()
    for _, parameter in weights.named_parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.run_phase(Step(1, 1))
    state = [
        tensor for parts in optimizer.state_dict().values() for tensor in parts.values() if torch.is_tensor(tensor)
    ]
    assert announced == {"optimizer_state": sum(tensor.nbytes for tensor in state if tensor.ndim)}
    assert _kinds(forecast) == _kinds(optimizer.state_dict())


def _kinds(state: dict[str, dict[str, torch.Tensor]]) -> dict[tuple[str, str], Any]:
    """Return the shapes and dtypes of an optimizer's state."""
    return {
        (name, key): (tensor.shape, tensor.dtype)
        for name, parts in state.items()
        for key, tensor in parts.items()
        if torch.is_tensor(tensor)
    }
