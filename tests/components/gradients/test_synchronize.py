"""Data-parallel gradient synchronization."""

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drawloom.components.gradients.synchronize import Synchronize
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.run import Step
from support.steps import losses_of
from support.weights import Weights


class NoReduction:
    """No other rank holds other parameters."""

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        return value

    def max_over_ranks(self, value: Tensor) -> Tensor:
        return value


def weights_with(gradient: Tensor) -> Weights:
    """Return two parameters, the second without a gradient."""
    weights = Weights.from_parameters(
        {"first": nn.Parameter(torch.zeros_like(gradient)), "second": nn.Parameter(torch.zeros(2))}
    )
    weights.parameters["first"].grad = gradient
    return weights


def run_phase(weights: Weights, mesh: Any, total: float, weight: float, why: str = "", **settings: Any) -> Step:
    """Return the step after the phase has run with the given sums on this rank, and 7 tokens."""
    phase = Synchronize(parameters=weights, mesh=mesh, reduce=NoReduction(), **settings)
    row = torch.zeros(1, 7, dtype=torch.int64)
    batches = [TokenBatch(row, row, row, row, row.float())]
    step = Step(1, 1, {"losses": losses_of(total, weight), "batches": batches})
    if why:
        step.skip(why)
    phase.run_phase(step)
    return step


class TwelveAlike:
    """Twelve ranks with the same numbers."""

    def sum(self, tensor: Tensor) -> None:
        one = tensor.clone()
        for _ in range(11):
            tensor += one


both = pytest.mark.parametrize("norm", ["exact", "device"])


@both
def test_gradient_and_loss_are_means_by_weight(one_rank: Any, norm: str) -> None:
    """Sums are divided by the total weight once; a parameter without a gradient gets zeros."""
    weights = weights_with(torch.tensor([6.0, 8.0]))
    step = run_phase(weights, one_rank, total=10.0, weight=2.0, norm=norm)
    gradients = [parameter.grad for _, parameter in weights.named_parameters()]
    assert [gradient.tolist() for gradient in gradients if gradient is not None] == [[3.0, 4.0], [0.0, 0.0]]
    assert step.state["loss"] == 5.0 and step.state.number("grad_norm") == pytest.approx(5.0) and not step.skip_reason
    assert {step.state[name].dtype for name in ("loss", "grad_norm", "loss_weight", "tokens")} == {torch.float64}


@both
@pytest.mark.parametrize(
    ("gradient", "total", "weight", "reason"),
    [
        (1.0, math.nan, 2.0, "the loss is nan"),
        (math.inf, 1.0, 2.0, "the norm of the gradients is inf"),
        (1.0, 0.0, 0.0, "there was no token to learn from"),
    ],
)
def test_a_non_finite_step_is_skipped(
    gradient: float, total: float, weight: float, reason: str, one_rank: Any, norm: str
) -> None:
    """A step with a non-finite loss or gradient norm, or without tokens, gets a reason and the flag."""
    step = run_phase(weights_with(torch.tensor([gradient])), one_rank, total, weight, norm=norm)
    assert step.state["skip"] == 1
    assert step.skip_reason == reason


@both
def test_a_reason_of_an_earlier_phase_is_kept(one_rank: Any, norm: str) -> None:
    """A finite step refused by a phase is skipped, on the device too."""
    step = run_phase(weights_with(torch.tensor([1.0])), one_rank, 1.0, 1.0, why="a phase says so", norm=norm)
    assert step.state["skip"] == 1
    assert step.skip_reason == "a phase says so"


@both
def test_tokens_are_whole_numbers(mesh_of: Any, norm: str) -> None:
    """Twelve context ranks count the same 7 tokens, a twelfth each: the sum is below 7 by rounding, and 7 count."""
    mesh = mesh_of(sizes={"context": 12}, replica_group=TwelveAlike())
    step = run_phase(weights_with(torch.tensor([1.0])), mesh, 1.0, 1.0, norm=norm)
    assert step.tokens == 7


@both
def test_a_step_is_freed_without_the_garbage_collector(one_rank: Any, norm: str) -> None:
    """A run collects garbage rarely, and a step has the batches and losses of all its microbatches."""
    step = run_phase(weights_with(torch.tensor([1.0])), one_rank, 1.0, 1.0, norm=norm)
    assert not step.skip_reason
    freed = weakref.ref(step.state)
    gc.disable()
    try:
        del step
        assert freed() is None
    finally:
        gc.enable()
