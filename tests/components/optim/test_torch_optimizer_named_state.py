"""All optimizers' state by parameter names: its device, and a rank without parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.optim.adamw import AdamW
from drawloom.components.optim.muon import Muon
from drawloom.components.optim.sgd import SGD
from drawloom.components.optim.stochastic_adamw import StochasticAdamW
from drawloom.components.ports.run import Step
from support.checkpoints import SingleRankMesh
from support.doubles import OneJob
from support.weights import Weights


def give_gradients(weights: Weights, *names: str) -> None:
    """Give a gradient to the parameters of these names, and None to the others."""
    for name, parameter in weights.named_parameters():
        parameter.grad = torch.full_like(parameter, 0.5) if name in names else None


def _stochastic(weights: Weights) -> StochasticAdamW:
    device = ComputeDevice(kind="cpu")
    return StochasticAdamW(parameters=weights, mesh=SingleRankMesh(), job=OneJob(), device=device, lr=0.1)


MAKERS: dict[str, Callable[[Weights], Any]] = {
    "adamw": lambda weights: AdamW(parameters=weights, mesh=SingleRankMesh(), lr=0.1),
    "amsgrad": lambda weights: AdamW(parameters=weights, mesh=SingleRankMesh(), lr=0.1, amsgrad=True),
    "muon": lambda weights: Muon(parameters=weights, mesh=SingleRankMesh(), lr=0.1, targets=["matrix"]),
    "sgd": lambda weights: SGD(parameters=weights, mesh=SingleRankMesh(), lr=0.1),
    "stochastic_adamw": _stochastic,
}


def _open_optimizer(kind: str, weights: Weights) -> Any:
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
    After a state in CPU memory is loaded, all its tensors, also a step count without dimensions, are on their
    parameter's device: otherwise a fused optimizer refuses to step.
    """
    weights = Weights()
    stepped, elsewhere = _open_optimizer(kind, weights), _open_optimizer(kind, Weights(device="meta"))
    give_gradients(weights, "matrix", "vector")
    stepped.run_phase(Step(1, 1))
    elsewhere.load_state_dict(stepped.state_dict())
    loaded = _tensors(elsewhere.state_dict())
    assert loaded.keys() == _tensors(stepped.state_dict()).keys() != set()
    assert {name: tensor.device.type for name, tensor in loaded.items()} == dict.fromkeys(loaded, "meta")


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_loaded_state_is_a_copy(kind: str) -> None:
    """A step after loading does not change the loaded state."""
    weights, others = Weights(), Weights()
    first, second = _open_optimizer(kind, weights), _open_optimizer(kind, others)
    give_gradients(weights, "matrix", "vector")
    first.run_phase(Step(1, 2))
    before = {name: tensor.clone() for name, tensor in _tensors(first.state_dict()).items()}
    second.load_state_dict(first.state_dict())
    give_gradients(others, "matrix", "vector")
    second.run_phase(Step(2, 2))
    after = _tensors(first.state_dict())
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("kind", MAKERS)
def test_a_rank_without_parameters_steps_and_resumes(kind: str) -> None:
    """A pipeline rank whose parameters are all frozen steps, and saves and loads an empty state."""
    optimizer, resumed = (_open_optimizer(kind, Weights({})) for _ in range(2))
    step = Step(1, 2)
    optimizer.run_phase(step)
    assert step.state["lr"] == 0.1
    assert optimizer.state_slices() == {} and optimizer.state_dict() == {}
    resumed.load_state_dict(optimizer.state_dict())
    resumed.run_phase(Step(2, 2))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_parameter_without_gradients_has_an_entry(kind: str) -> None:
    """A parameter without any gradient so far has an empty entry in the state."""
    weights, others = Weights(), Weights()
    optimizer, resumed = _open_optimizer(kind, weights), _open_optimizer(kind, others)
    give_gradients(weights, "matrix")
    optimizer.run_phase(Step(1, 2))
    assert list(optimizer.state_dict()) == ["matrix", "vector"] and optimizer.state_dict()["vector"] == {}
    resumed.load_state_dict(optimizer.state_dict())
    for side, node in ((weights, optimizer), (others, resumed)):
        give_gradients(side, "matrix", "vector")
        node.run_phase(Step(2, 2))
    for name, tensor in _tensors(optimizer.state_dict()).items():
        assert torch.equal(_tensors(resumed.state_dict())[name], tensor)


@pytest.mark.parametrize(("saved", "resumed"), [("sgd", "muon"), ("muon", "sgd"), ("adamw", "amsgrad")])
def test_state_without_the_optimizers_means_is_refused(saved: str, resumed: str) -> None:
    """Another optimizer's means are not used as one's own: SGD's sum of gradients is not Muon's mean."""
    weights = Weights()
    optimizer, other = _open_optimizer(saved, weights), _open_optimizer(resumed, Weights())
    give_gradients(weights, "matrix", "vector")
    optimizer.run_phase(Step(1, 2))
    with pytest.raises(ValueError, match=r"has (step|exp_avg|momentum_buffer).*, and not (exp|max|mom)"):
        other.load_state_dict(optimizer.state_dict())


def test_means_that_an_optimizer_lacks_are_not_kept() -> None:
    """AdamW that goes on without AMSGrad neither keeps nor saves the largest means."""
    weights = Weights()
    optimizer, other = _open_optimizer("amsgrad", weights), _open_optimizer("adamw", Weights())
    give_gradients(weights, "matrix", "vector")
    optimizer.run_phase(Step(1, 2))
    other.load_state_dict(optimizer.state_dict())
    assert {key for part in other.state_dict().values() for key in part} == {"step", "exp_avg", "exp_avg_sq"}
