"""What may travel between stages."""

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.pipeline.boundaries import Boundaries
from drawloom.components.pipeline.executor import Executor
from drawloom.components.ports.data import Batch
from drawloom.components.ports.model import Shared, Span, Stage
from support import pipelines
from support.processes import run_ranks


@attrs.frozen
class Parcel:
    """What goes from the first stage to the second: a tree with all kinds of leaves."""

    hidden: dict[str, Tensor]
    counts: tuple[Tensor, Tensor]
    nothing: None = None


class First(nn.Module):
    """Gives a transposed (not contiguous) tensor, one that nobody uses, integers, booleans and None."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6, dtype=torch.float64).reshape(2, 3) / 7)
        self.spare = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, inputs: Tensor, shared: Shared) -> Parcel:
        found = (inputs.double().unsqueeze(-1) * self.weight[0]).transpose(0, 1)
        unused = self.spare * inputs.double().sum()
        return Parcel({"found": found, "unused": unused}, (inputs.long(), inputs > 2))


class Second(nn.Module):
    """Uses most of it; a weight of its own does not depend on what came."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 0.5, dtype=torch.float64))
        self.apart = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, inputs: Parcel, shared: Shared) -> Tensor:
        assert inputs.nothing is None and inputs.counts[0].dtype == torch.int64 and inputs.counts[1].dtype == torch.bool
        mixed = inputs.hidden["found"] * self.weight * inputs.counts[1].transpose(0, 1).unsqueeze(-1)
        return mixed.sum() + self.apart.exp() * shared.positions.sum()


class SumOfAll:
    """The loss is the output."""

    def inputs(self, batch: Batch) -> tuple[Tensor, Shared]:
        return batch.tokens, Shared(batch.positions, batch.documents)

    def loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return output.square(), torch.tensor(batch.tokens.numel())


@attrs.frozen
class Spread:
    """This rank's stages, and what passes between all."""

    local: list[Stage]
    boundaries: Boundaries

    def boundary(self, stage: int, tokens: Tensor, shared: Shared) -> Any:
        return self.boundaries.of(stage, tokens, shared)


SPANS = [Span(0, 1, embedding=True, head=False), Span(1, 2, embedding=False, head=True)]


def build(span: Span) -> nn.Module:
    """The module of a stage."""
    return First() if span.embedding else Second()


def meta(span: Span) -> nn.Module:
    """The module of a stage on the meta device."""
    with torch.device("meta"):
        return build(span)


def batches() -> list[Batch]:
    """Microbatches of different shapes."""
    rows = [torch.arange(2 * (2 + number)).reshape(2, -1) for number in range(4)]
    return [Batch(row, row, row, row) for row in rows]


def travelled(name: str) -> dict[str, Any]:
    """Gradients of this rank, and its part of the loss, after a step with a schedule."""
    device = ComputeDevice(kind="cpu")
    processes = TorchProcesses(device=device, timeout=30.0)
    processes.open()
    try:
        mesh = RankMesh(processes=processes, pipeline=2, data_replicate=1)
        mesh.open()
        rank = mesh.index("pipeline")
        stages = Spread([Stage(rank, 2, SPANS[rank], build(SPANS[rank]))], Boundaries(SPANS, meta))
        executor = Executor(
            stages=stages,
            boundaries=stages,
            schedule=pipelines.schedule(name),
            objective=SumOfAll(),
            mesh=mesh,
            neighbours=mesh,
            device=device,
        )
        executor.open()
        losses = executor.train(batches())
        grads = {key: grads_of(parameter) for key, parameter in stages.local[0].module.named_parameters()}
        return {"grads": grads, "loss": float(losses.total)}
    finally:
        processes.close()


def grads_of(parameter: nn.Parameter) -> Any:
    """A gradient as numbers; zeros are as good as none."""
    return [0.0] * parameter.numel() if parameter.grad is None else parameter.grad.flatten().tolist()


@pytest.mark.parametrize("name", ["one_f_one_b", "zero_bubble_1p"])
def test_trees_of_all_kinds_of_leaves_travel(name: str) -> None:
    """Integers, booleans, None, unused and non-contiguous tensors pass; gradients are those of the chained model."""
    first, second = First(), Second()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches():
        tokens, shared = SumOfAll().inputs(batch)
        loss, _ = SumOfAll().loss(second(first(tokens, shared), shared), batch)
        torch.autograd.backward(loss)
        total += loss.detach()
    ranks = run_ranks(travelled, 2, name)
    assert sum(rank["loss"] for rank in ranks) == pytest.approx(float(total), rel=1e-12)
    for module, rank in zip((first, second), ranks, strict=True):
        for key, parameter in module.named_parameters():
            assert rank["grads"][key] == pytest.approx(grads_of(parameter), rel=1e-12), key
