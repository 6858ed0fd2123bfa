"""AdamW by parameter names."""

import copy

import pytest
import torch

from drawloom.components.optim.adamw import AdamW
from drawloom.components.ports.run import Step
from support.checkpoints import SingleRankMesh
from support.steps import make_skipped_step
from support.weights import Weights


def open_optimizer(weights: Weights, **settings: float) -> AdamW:
    """Return an open optimizer."""
    optimizer = AdamW(parameters=weights, mesh=SingleRankMesh(), **{"lr": 0.1, **settings})  # type: ignore[arg-type]
    optimizer.open()
    return optimizer


def test_steps_equal_those_of_the_paper() -> None:
    """Two steps equal algorithm 2 of the paper, written out in float64; the vector does not decay."""
    weights = Weights()
    expected = {name: p.detach().double() for name, p in weights.named_parameters()}
    means = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in expected.items()}
    optimizer = open_optimizer(weights, weight_decay=0.5)
    for number in (1, 2):
        weights.give_gradients(number)
        for name, parameter in weights.named_parameters():
            gradient, (m, v) = parameter.grad.double(), means[name]  # type: ignore[union-attr]
            m, v = means[name] = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
            decayed = expected[name] * (1 - 0.1 * (0.5 if name == "matrix" else 0))
            expected[name] = decayed - 0.1 * (m / (1 - 0.9**number)) / ((v / (1 - 0.95**number)).sqrt() + 1e-8)
        optimizer.run_phase(Step(number, 2))
    for name, parameter in weights.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


def test_state_loads_into_a_new_optimizer() -> None:
    """A step after loading the state is bitwise equal to an uninterrupted optimizer's."""
    weights, others = Weights(), Weights()
    first, second = open_optimizer(weights), open_optimizer(others)
    weights.give_gradients(1)
    first.run_phase(Step(1, 2))
    with torch.no_grad():
        for (_, target), (_, source) in zip(others.named_parameters(), weights.named_parameters(), strict=True):
            target.copy_(source)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for optimizer, side in ((first, weights), (second, others)):
        side.give_gradients(2)
        optimizer.run_phase(Step(2, 2))
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(weights.named_parameters(), others.named_parameters(), strict=True)
    )


def test_a_skipped_step_only_clears_the_gradients() -> None:
    """A skipped step leaves weights and state bitwise unchanged, and clears the gradients."""
    weights = Weights()
    matrix = weights.parameters["matrix"]
    before = matrix.detach().clone()
    optimizer = open_optimizer(weights)
    weights.give_gradients(1)
    optimizer.run_phase(make_skipped_step(1, 1))
    assert torch.equal(matrix, before) and matrix.grad is None
    assert optimizer.state_dict() == {"vector": {}, "matrix": {}}


def test_lr_is_the_base_times_lr_factor() -> None:
    """The learning rate in use is in the step's outputs."""
    weights = Weights()
    weights.give_gradients(1)
    step = Step(1, 1, {"lr_factor": 0.25})
    open_optimizer(weights).run_phase(step)
    assert step.state["lr"] == pytest.approx(0.025)


def test_state_of_other_parameters_is_refused() -> None:
    """A missing or unknown parameter in the state is an error naming it."""
    with pytest.raises(KeyError, match="vector"):
        open_optimizer(Weights()).load_state_dict({"matrix": {}})
