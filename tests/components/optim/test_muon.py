"""Muon beside torch's own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from drawloom.components.optim.muon import Muon
from drawloom.components.optim.parameter_groups import AdamGroup
from drawloom.components.ports.run import Step
from drawloom.graph import UserError
from support.checkpoints import SingleRankMesh
from support.equality import assert_equal
from support.weights import Weights

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (7, 6),
    "layers.0.up": (9, 6),
    "layers.0.down": (6, 9),
    "layers.1.up": (9, 6),
}
SHAPES |= {"layers.0.norm": (6,), "layers.1.experts": (3, 9, 6)}
MATRICES = ("layers.0.up", "layers.0.down", "layers.1.up")


def open_optimizer(weights: Weights, **settings: Any) -> Muon:
    """Return an optimizer with the rate 0.1."""
    optimizer = Muon(parameters=weights, mesh=SingleRankMesh(), **{"lr": 0.1, **settings})
    optimizer.open()
    return optimizer


def of_torch(parameters: Any, how: dict[str, Any]) -> torch.optim.Optimizer:
    """torch's Muon, with the rate 0.1."""
    return torch.optim.Muon(parameters, **{"lr": 0.1, "adjust_lr_fn": "match_rms_adamw", **how})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("how", [{}, {"adjust_lr_fn": "original", "nesterov": False, "momentum": 0.5, "ns_steps": 3}])
def test_steps_equal_those_of_torch(how: dict[str, Any], dtype: torch.dtype) -> None:
    """Layers' matrices are bitwise equal to torch.optim.Muon's, all others but stacks to torch.optim.AdamW's."""
    ours, theirs = Weights(SHAPES, dtype), Weights(SHAPES, dtype)
    optimizer = open_optimizer(
        ours, groups=[AdamGroup(targets=["layers.1.up"], lr_multiplier=0.5, weight_decay=0.2)], **how
    )
    halved = {"params": [theirs.parameters["layers.1.up"]], "lr": 0.05, "weight_decay": 0.2}
    muon = of_torch([{"params": [theirs.parameters[name] for name in MATRICES[:2]]}, halved], how)
    rest = [
        {"params": [theirs.parameters["embed.weight"]], "weight_decay": 0.1},
        {"params": [theirs.parameters["layers.0.norm"]], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(rest, lr=0.1, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for number in (1, 2, 3):
        ours.give_gradients(number)
        theirs.give_gradients(number)
        optimizer.run_phase(Step(number, 3))
        muon.step()
        adam.step()
    for name in SHAPES.keys() - {"layers.1.experts"}:
        assert torch.equal(ours.parameters[name], theirs.parameters[name]), name


def test_maximizing_is_minimizing_the_negative() -> None:
    """Steps up the gradients are steps down their negatives, for matrices and for all others."""
    up, down = Weights(SHAPES), Weights(SHAPES)
    climbing, falling = open_optimizer(up, maximize=True), open_optimizer(down)
    for number in (1, 2, 3):
        up.give_gradients(number)
        down.give_gradients(number)
        for _, part in down.named_parameters():
            assert part.grad is not None
            part.grad.neg_()
        climbing.run_phase(Step(number, 3))
        falling.run_phase(Step(number, 3))
    assert_equal(dict(up.named_parameters()), dict(down.named_parameters()))


def test_each_matrix_of_a_stack_has_the_steps_of_a_matrix() -> None:
    """Stacked experts move like torch.optim.Muon's single matrices."""
    ours, theirs = Weights(SHAPES, torch.float64), Weights(SHAPES, torch.float64)
    optimizer = open_optimizer(ours)
    apart = [nn.Parameter(matrix.detach().clone()) for matrix in theirs.parameters["layers.1.experts"]]
    muon = of_torch(apart, {})
    for number in (1, 2):
        ours.give_gradients(number)
        theirs.give_gradients(number)
        gradient = theirs.parameters["layers.1.experts"].grad
        assert gradient is not None
        for single, part in zip(apart, gradient, strict=True):
            single.grad = part
        optimizer.run_phase(Step(number, 2))
        muon.step()
    expected: Tensor = torch.stack([single.detach() for single in apart])
    assert_equal({"experts": ours.parameters["layers.1.experts"].detach()}, {"experts": expected})


def test_a_step_after_loading_is_the_one_that_was_interrupted() -> None:
    """State of both optimizers comes back by name, as copies."""
    weights, others = Weights(SHAPES, torch.float64), Weights(SHAPES, torch.float64)
    first, second = open_optimizer(weights), open_optimizer(others)
    weights.give_gradients(1)
    first.run_phase(Step(1, 2))
    with torch.no_grad():
        for (_, target), (_, source) in zip(others.named_parameters(), weights.named_parameters(), strict=True):
            target.copy_(source)
    second.load_state_dict(first.state_dict())
    for optimizer, side in ((first, weights), (second, others)):
        side.give_gradients(2)
        optimizer.run_phase(Step(2, 2))
    assert_equal(dict(weights.named_parameters()), dict(others.named_parameters()))
    assert_equal(first.state_dict(), second.state_dict())


def test_targets_without_a_matrix_are_refused() -> None:
    """A pattern in `targets` that matches only vectors, or no parameter, is an error."""
    with pytest.raises(UserError, match=r"targets of the optimizer: the pattern '\*norm' matches no trained matrix"):
        open_optimizer(Weights(SHAPES, torch.float64), targets=["*.up", "*norm"])


@pytest.mark.parametrize("how", [{}, {"ns_steps": 2, "targets": ["*.up"]}])
def test_operations_of_an_update_equal_the_count_of_torch(how: dict[str, Any]) -> None:
    """Products in a step are counted, for matrices in either orientation and stacks; without `open`."""
    weights = Weights(SHAPES)
    weights.give_gradients(0)
    planned = Muon(parameters=weights, mesh=SingleRankMesh(), lr=0.1, **how).count_update_flops()
    optimizer = open_optimizer(weights, **how)
    with FlopCounterMode(display=False) as counted:
        optimizer.run_phase(Step(1, 1))
    assert planned == counted.get_total_flops() > 0
