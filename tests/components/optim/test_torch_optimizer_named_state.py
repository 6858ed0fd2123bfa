"""The state of every optimizer by parameter names: its device, and that of a rank without parameters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.optim.adamw import AdamW
from drawloom.components.optim.muon import Muon
from drawloom.components.optim.sgd import SGD
from drawloom.components.optim.stochastic_adamw import StochasticAdamW
from drawloom.components.ports.run import Step
from support.checkpoints import SingleRankMesh


class Weights:
    """A matrix and a vector to train, on a device; or no parameters."""

    def __init__(self, device: str = "cpu", shapes: dict[str, tuple[int, ...]] | None = None) -> None:
        shapes = {"matrix": (3, 4), "vector": (4,)} if shapes is None else shapes
        self._named = [(name, nn.Parameter(torch.ones(shape, device=device))) for name, shape in shapes.items()]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return self._named

    def slices(self) -> dict[str, Any]:
        return dict.fromkeys(name for name, _ in self.named())

    def give_gradients(self, *names: str) -> None:
        for name, parameter in self._named:
            parameter.grad = torch.full_like(parameter, 0.5) if name in names else None


@attrs.frozen
class OneJob:
    seed: int = 3
    name: str = "run"
    path: Path = Path("runs/run")


def _stochastic(weights: Weights) -> StochasticAdamW:
    device = ComputeDevice(kind="cpu")
    return StochasticAdamW(parameters=weights, mesh=SingleRankMesh(), job=OneJob(), device=device, lr=0.1)


MAKERS: dict[str, Callable[[Weights], Any]] = {
    "adamw": lambda weights: AdamW(parameters=weights, mesh=SingleRankMesh(), lr=0.1),
    "muon": lambda weights: Muon(parameters=weights, mesh=SingleRankMesh(), lr=0.1, targets=["matrix"]),
    "sgd": lambda weights: SGD(parameters=weights, mesh=SingleRankMesh(), lr=0.1),
    "stochastic_adamw": _stochastic,
}


def _opened(kind: str, weights: Weights) -> Any:
    optimizer = MAKERS[kind](weights)
    optimizer.open()
    return optimizer


def _tensors(state: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": part for name, parts in state.items() for key, part in parts.items() if torch.is_tensor(part)
    }


@pytest.mark.parametrize("kind", MAKERS)
def test_loaded_state_is_on_the_device_of_the_parameter(kind: str) -> None:
    """
    Every tensor of a state that was read into CPU memory, also a step count without dimensions, is where its
    parameter is: a fused optimizer refuses to step with any of them elsewhere.
    """
    weights = Weights()
    stepped, elsewhere = _opened(kind, weights), _opened(kind, Weights("meta"))
    weights.give_gradients("matrix", "vector")
    stepped.run_phase(Step(1, 1))
    elsewhere.load_state_dict(stepped.state_dict())
    loaded = _tensors(elsewhere.state_dict())
    assert loaded.keys() == _tensors(stepped.state_dict()).keys() != set()
    assert {name: tensor.device.type for name, tensor in loaded.items()} == dict.fromkeys(loaded, "meta")


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_loaded_state_is_a_copy(kind: str) -> None:
    """A step after loading does not change the state that was loaded."""
    weights, others = Weights(), Weights()
    first, second = _opened(kind, weights), _opened(kind, others)
    weights.give_gradients("matrix", "vector")
    first.run_phase(Step(1, 2))
    before = {name: tensor.clone() for name, tensor in _tensors(first.state_dict()).items()}
    second.load_state_dict(first.state_dict())
    others.give_gradients("matrix", "vector")
    second.run_phase(Step(2, 2))
    after = _tensors(first.state_dict())
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("kind", MAKERS)
def test_a_rank_without_parameters_steps_and_resumes(kind: str) -> None:
    """A pipeline rank whose parameters are all frozen steps, and saves and loads an empty state."""
    optimizer, resumed = (_opened(kind, Weights(shapes={})) for _ in range(2))
    step = Step(1, 2)
    optimizer.run_phase(step)
    assert step.state["lr"] == 0.1
    assert optimizer.state_slices() == {} and optimizer.state_dict() == {}
    resumed.load_state_dict(optimizer.state_dict())
    resumed.run_phase(Step(2, 2))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_parameter_without_gradients_has_an_entry(kind: str) -> None:
    """A parameter that has had no gradient so far has an empty entry in the state."""
    weights, others = Weights(), Weights()
    optimizer, resumed = _opened(kind, weights), _opened(kind, others)
    weights.give_gradients("matrix")
    optimizer.run_phase(Step(1, 2))
    assert list(optimizer.state_dict()) == ["matrix", "vector"] and optimizer.state_dict()["vector"] == {}
    resumed.load_state_dict(optimizer.state_dict())
    for side, node in ((weights, optimizer), (others, resumed)):
        side.give_gradients("matrix", "vector")
        node.run_phase(Step(2, 2))
    for name, tensor in _tensors(optimizer.state_dict()).items():
        assert torch.equal(_tensors(resumed.state_dict())[name], tensor)
