"""Programs carried out on a rank's stages."""

from collections.abc import Sequence
from typing import Any
from weakref import ref

import attrs
import pytest
import torch
from torch import Tensor, nn

from drawloom.components.pipeline.executor import Executor
from drawloom.components.ports.data import Batch
from drawloom.components.ports.model import Shared, Span, Stage
from drawloom.components.ports.pipeline import Action, Program


@attrs.frozen
class Cpu:
    """A device."""

    device: torch.device = torch.device("cpu")
    backend: str = "gloo"

    def memory(self) -> int:
        return 0


class Squares:
    """The loss: the sum of squares of outputs; each token weighs 1."""

    def inputs(self, batch: Batch) -> tuple[Tensor, Shared]:
        return batch.tokens.double(), Shared(batch.positions, batch.documents)

    def loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return output.square().sum(), torch.tensor(batch.tokens.numel())


class Scale(nn.Module):
    """A stage: multiplies by a weight; `seen` keeps weak references to what it gave."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))
        self.seen: list[Any] = []

    def forward(self, inputs: Tensor, shared: Shared) -> Tensor:
        output = inputs * self.weight
        self.seen.append(ref(output))
        return output


@attrs.frozen
class Local:
    """Stages of this rank."""

    local: list[Stage]


class BreadthFirst:
    """All forwards stage by stage, then all backwards."""

    def __init__(self, stages: int) -> None:
        self.stages_per_rank = stages

    def program(self, ranks: int, microbatches: int) -> Program:
        stages = range(self.stages_per_rank)
        forwards = [Action(stage, "F", number) for stage in stages for number in range(microbatches)]
        backwards = [Action(stage, "B", number) for stage in reversed(stages) for number in range(microbatches)]
        return [[*forwards, *backwards]]


def batches(count: int) -> list[Batch]:
    """Microbatches of different shapes."""
    tokens = [torch.arange(1, 3 + number).unsqueeze(0) for number in range(count)]
    return [Batch(part, part, part, torch.zeros_like(part)) for part in tokens]


def made(modules: Sequence[Scale], mesh: Any) -> Executor:
    """An executor of one rank that owns all stages."""
    spans = [Span(number, number + 1, number == 0, number == len(modules) - 1) for number in range(len(modules))]
    stages = [Stage(number, len(modules), spans[number], module) for number, module in enumerate(modules)]
    return Executor(
        stages=Local(stages), schedule=BreadthFirst(len(modules)), objective=Squares(), mesh=mesh, device=Cpu()
    )


@pytest.mark.parametrize("weights", [(3.0,), (2.0, 1.5)])
def test_gradients_and_losses_are_those_of_the_whole_model(weights: tuple[float, ...], one_rank: Any) -> None:
    """However many stages a rank owns, losses and gradients are sums over the microbatches of the chained model."""
    modules = [Scale(weight) for weight in weights]
    losses = made(modules, one_rank).train(batches(3))
    squares = sum(float(batch.tokens.square().sum()) for batch in batches(3))
    whole = torch.tensor(weights).prod().item()
    assert float(losses.total) == pytest.approx(squares * whole**2)
    assert float(losses.weight) == sum(batch.tokens.numel() for batch in batches(3))
    for module, weight in zip(modules, weights, strict=True):
        assert module.weight.grad is not None
        assert float(module.weight.grad) == pytest.approx(2 * squares * whole**2 / weight)


def test_nothing_outlives_the_pass(one_rank: Any) -> None:
    """No output of a stage is alive once the pass is over."""
    modules = [Scale(2.0), Scale(1.5)]
    made(modules, one_rank).train(batches(2))
    assert [output() for module in modules for output in module.seen] == [None] * 4


def test_evaluation_leaves_no_gradient_and_adds_up_in_float64(one_rank: Any) -> None:
    """Evaluation gives the losses of training, and no gradient."""
    modules = [Scale(2.0), Scale(1.5)]
    executor = made(modules, one_rank)
    evaluated = executor.evaluate(iter(batches(3)))
    assert all(module.weight.grad is None for module in modules)
    trained = executor.train(batches(3))
    assert evaluated.total.dtype == torch.float64
    assert float(evaluated.total) == float(trained.total) and float(evaluated.weight) == float(trained.weight)
