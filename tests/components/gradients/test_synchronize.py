"""Data-parallel gradient synchronization."""

import math
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from drawloom.components.gradients.synchronize import Synchronize
from drawloom.components.ports.pipeline import Losses
from drawloom.components.ports.run import Step


@attrs.frozen
class Float32:
    """Everything in float32."""

    parameter: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    gradient: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    uncast: tuple[str, ...] = ()


class NoReduction:
    """No other rank holds other parameters."""

    def total(self, value: Tensor) -> Tensor:
        return value


class Weights:
    """Two parameters, of which the second has no gradient."""

    def __init__(self, gradient: Tensor) -> None:
        self.first, self.second = nn.Parameter(torch.zeros_like(gradient)), nn.Parameter(torch.zeros(2))
        self.first.grad = gradient

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [("first", self.first), ("second", self.second)]

    def slices(self) -> dict[str, Any]:
        return dict.fromkeys(name for name, _ in self.named())

    def counted(self) -> list[tuple[str, nn.Parameter]]:
        return self.named()

    def sum_shared(self) -> None: ...


@attrs.frozen
class Twins:
    """A group of two replicas with equal tensors."""

    rank: int = 0
    size: int = 2

    def sum(self, tensor: Tensor) -> None:
        tensor.mul_(2)

    def max(self, tensor: Tensor) -> None: ...

    def gather_json(self, value: Any) -> list[Any]:
        return [value, value]


def taken(weights: Weights, mesh: Any, total: float, weight: float, why: str = "", **settings: Any) -> Step:
    """The step after the phase has run with the given sums on this rank."""
    phase = Synchronize(parameters=weights, mesh=mesh, precision=Float32(), reduce=NoReduction(), **settings)
    sums = torch.tensor([total, weight], dtype=torch.float64)
    step = Step(1, 1, tokens=7, skip_reason=why, outputs={"losses": Losses(*sums)})
    phase.run_phase(step)
    return step


both = pytest.mark.parametrize("norm", ["exact", "device"])


@both
def test_gradient_and_loss_are_means_by_weight(one_rank: Any, norm: str) -> None:
    """Sums are divided by the total weight once; a parameter without a gradient gets zeros."""
    weights = Weights(torch.tensor([6.0, 8.0]))
    step = taken(weights, one_rank, total=10.0, weight=2.0, norm=norm)
    assert step.settled is (norm == "exact") and step.outputs["loss"] == 5.0
    step.settle()
    assert weights.first.grad is not None and weights.first.grad.tolist() == [3.0, 4.0]
    assert weights.second.grad is not None and weights.second.grad.tolist() == [0.0, 0.0]
    assert step.outputs["loss"] == 5.0 and step.outputs["grad_norm"] == pytest.approx(5.0) and not step.skip_reason
    assert [type(step.outputs[name]) for name in ("loss", "grad_norm")] == [float, float]


@both
@pytest.mark.parametrize("bucket_bytes", [1, 12, 2**20])
def test_two_equal_replicas_give_the_gradient_of_one(bucket_bytes: int, mesh_of: Any, norm: str) -> None:
    """The sum over equal replicas divided by the total weight is the gradient of one, for any bucket size."""
    weights = Weights(torch.tensor([6.0, 8.0]))
    mesh = mesh_of(replicas=Twins())
    step = taken(weights, mesh, total=10.0, weight=2.0, bucket_bytes=bucket_bytes, norm=norm)
    assert weights.first.grad is not None and weights.first.grad.tolist() == [3.0, 4.0]
    assert step.tokens == 14 and step.outputs["loss"] == 5.0


def test_float64_gradients_are_reduced_in_float64(mesh_of: Any) -> None:
    """Float64 gradients are summed in float64, though `reduce` is float32, also beside float32 ones."""
    weights = Weights(torch.tensor([1 + 2**-40, 8.0], dtype=torch.float64))
    taken(weights, mesh_of(replicas=Twins()), total=1.0, weight=1.0)
    assert weights.first.grad is not None and weights.first.grad.tolist() == [1 + 2**-40, 8.0]
    assert weights.second.grad is not None and weights.second.grad.dtype == torch.float32


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
    """A step with a non-finite loss or gradient norm, or without tokens, gets a skip_reason, and found_inf if late."""
    step = taken(Weights(torch.tensor([gradient])), one_rank, total, weight, norm=norm)
    assert (step.found_inf is None) if norm == "exact" else (step.found_inf == 1)
    assert step.skip_reason == reason


@both
def test_a_reason_of_an_earlier_phase_is_kept(one_rank: Any, norm: str) -> None:
    """A finite step that a phase refuses is skipped, on the device too."""
    step = taken(Weights(torch.tensor([1.0])), one_rank, 1.0, 1.0, why="a phase says so", norm=norm)
    assert step.found_inf is None or step.found_inf == 1
    assert step.skip_reason == "a phase says so"
