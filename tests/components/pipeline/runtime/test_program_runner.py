"""Trees of tensors sent between stages."""

import re
from functools import partial
from typing import Any, ClassVar

import attrs
import pytest
import torch
from torch import Tensor, nn

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.model import BatchContext, Finish, LayerRange, TokenContext
from drawloom.components.ports.pipeline import sum_losses_and_weights
from drawloom.components.ports.program import Action, Program
from drawloom.components.ports.stages import Stage
from drawloom.components.stages.activation_specs import ActivationSpecs
from support import pipelines
from support.doubles import PlainStages
from support.processes import RanksFailedError, run_ranks
from support.steps import train

NO_HEAD: Any = None
"""Losses here need none."""


@attrs.frozen
class Parcel:
    """A message from the first stage to the second: a tree with all kinds of leaves."""

    hidden: dict[str, Tensor]
    counts: tuple[Tensor, Tensor]
    nothing: int | None = None


class First(nn.Module):
    """Gives a transposed (not contiguous) tensor, a complex one, an unused one, integers, booleans and None."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6, dtype=torch.float64).reshape(2, 3) / 7)
        self.spare = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, inputs: Tensor, shared: BatchContext) -> Parcel:
        scaled = (inputs.double().unsqueeze(-1) * self.weight[0]).transpose(0, 1)
        unused = self.spare * inputs.double().sum()
        turned = scaled * torch.tensor(0.6 + 0.8j, dtype=torch.complex128)
        return Parcel({"found": scaled, "unused": unused, "turned": turned}, (inputs.long(), inputs > 2))


class Second(nn.Module):
    """A stage with most of its input in use, and a weight independent of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 0.5, dtype=torch.float64))
        self.apart = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, inputs: Parcel, shared: TokenContext, finish: Finish) -> Any:
        assert inputs.nothing is None and inputs.counts[0].dtype == torch.int64 and inputs.counts[1].dtype == torch.bool
        mixed = inputs.hidden["found"] * self.weight * inputs.counts[1].transpose(0, 1).unsqueeze(-1)
        turned = (inputs.hidden["turned"] ** 2).imag.sum()
        return finish(mixed.sum() + turned / 10 + self.apart.exp() * shared.positions.sum(), NO_HEAD)


class SumOfAll:
    """The loss is the output."""

    batch_leaves: ClassVar[tuple[str, ...]] = ("tokens", "positions", "document_ids", "weights")

    def inputs(self, batch: TokenBatch) -> tuple[Tensor, BatchContext]:
        return batch.tokens, TokenContext(batch.positions, batch.document_ids)

    def loss(self, hidden: Tensor, head: Any, batch: TokenBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return hidden.square(), batch.weights.sum(), {}


@attrs.frozen
class Spread(PlainStages):
    """This rank's stages, and the tensors between all stages."""

    local: list[Stage]
    boundaries: ActivationSpecs

    def infer_stage_inputs(self, stage: int, inputs: Any, shared: BatchContext) -> Any:
        return self.boundaries.infer_stage_inputs(stage, inputs, shared)


SPANS = [LayerRange(0, 1, embedding=True, head=False), LayerRange(1, 2, embedding=False, head=True)]


def build(span: LayerRange) -> nn.Module:
    """Return the module of a stage."""
    return First() if span.embedding else Second()


def meta(span: LayerRange) -> nn.Module:
    """Return the module of a stage on the meta device."""
    with torch.device("meta"):
        return build(span)


def batches() -> list[TokenBatch]:
    """Microbatches of different shapes."""
    rows = [torch.arange(2 * (2 + number)).reshape(2, -1) for number in range(4)]
    return [TokenBatch(row, row, row, row, torch.ones(row.shape)) for row in rows]


class Faulty(First):
    """A first stage with another output than on the meta device."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, inputs: Tensor, shared: BatchContext) -> Any:
        given = super().forward(inputs, shared)
        if inputs.shape[1] < 3:  # the first microbatch is right
            return given
        match self.fault:
            case "dtype":
                given.hidden["found"] = given.hidden["found"].bfloat16()
            case "shape":
                given.hidden["found"] = given.hidden["found"][:, :1]
            case "missing":
                del given.hidden["unused"]
            case "constant":
                return attrs.evolve(given, nothing=3)
        return given


def run_schedule(name: str, fault: str = "") -> dict[str, Any]:
    """Gradients of this rank, and its part of the loss, after a step with a schedule."""
    device = ComputeDevice(kind="cpu")
    processes = TorchProcesses(device=device, timeout=30.0)
    processes.open()
    try:
        mesh = RankMesh(processes=processes, pipeline=2, data_replicate=1)
        mesh.open()
        rank = mesh.indices.pipeline
        module = Faulty(fault) if fault and rank == 0 else build(SPANS[rank])
        stages = Spread([Stage(rank, 2, SPANS[rank], module)], ActivationSpecs(SPANS, meta))
        executor = ProgramExecutor(
            stages=stages,
            schedule=pipelines.schedule(name),
            objective=SumOfAll(),
            mesh=mesh,
            device=device,
        )
        executor.open()
        state = train(executor, batches())
        grads = {key: grads_of(parameter) for key, parameter in stages.local[0].module.named_parameters()}
        return {"grads": grads, "loss": float(sum_losses_and_weights(state)[0])}
    finally:
        processes.close()


def grads_of(parameter: nn.Parameter) -> Any:
    """Return a gradient as numbers; zeros count like a missing gradient."""
    return [0.0] * parameter.numel() if parameter.grad is None else parameter.grad.flatten().tolist()


@pytest.mark.parametrize("name", ["one_f_one_b", "zero_bubble_1p"])
def test_trees_of_all_kinds_of_leaves_travel(name: str) -> None:
    """Integers, booleans, None, complex, unused, non-contiguous tensors pass; gradients are the chained model's."""
    first, second = First(), Second()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches():
        tokens, shared = SumOfAll().inputs(batch)
        loss, *_ = second(first(tokens, shared), shared, partial(SumOfAll().loss, batch=batch))
        torch.autograd.backward(loss)
        total += loss.detach()
    ranks = run_ranks(run_schedule, 2, name)
    assert sum(rank["loss"] for rank in ranks) == pytest.approx(float(total), rel=1e-12)
    for module, rank in zip((first, second), ranks, strict=True):
        for key, parameter in module.named_parameters():
            assert rank["grads"][key] == pytest.approx(grads_of(parameter), rel=1e-12), key


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("dtype", r"leaf \.hidden\['found'\] is bfloat16 of shape \(3, 2, 3\), and float64 of shape \(3, 2, 3\) is"),
        ("shape", r"leaf \.hidden\['found'\] is float64 of shape \(3, 1, 3\), and float64 of shape \(3, 2, 3\) is"),
        ("missing", r"there are 2 leaves in \.hidden, and 3 are expected"),
        ("constant", r"leaf \.nothing is 3, and None is expected"),
    ],
)
def test_a_payload_that_the_receiver_would_misread_is_refused(fault: str, text: str) -> None:
    """A dtype, shape, structure or constant different from the meta pass is an error on the sender, in words."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(run_schedule, 2, "one_f_one_b", fault)
    assert re.search(r"UserError: stage 0 has another output for microbatch 1 than rank 1", caught.value.failures[0])
    assert re.search(text, caught.value.failures[0]), caught.value.failures[0]


def hops(owners: tuple[int, ...]) -> float:
    """Return this rank's part of the loss for a chain of stages on these ranks."""
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=30.0)
    processes.open()
    try:
        mesh = RankMesh(processes=processes, pipeline=4, data_replicate=1)
        mesh.open()
        rank, count = mesh.indices.pipeline, len(owners)
        spans = [LayerRange(number, number + 1, number == 0, number == count - 1) for number in range(count)]
        modules = {stage: Twice() for stage, owner in enumerate(owners) if owner == rank}
        local = [Stage(stage, count, spans[stage], module) for stage, module in modules.items()]
        stages = Spread(local, ActivationSpecs(spans, lambda span: Twice()))
        schedule = Anywhere(owners)
        parts: dict[str, Any] = {"stages": stages, "mesh": mesh}
        executor = ProgramExecutor(schedule=schedule, objective=SumOfAll(), device=ComputeDevice(kind="cpu"), **parts)
        executor.open()
        return float(sum_losses_and_weights(train(executor, batches()))[0])
    finally:
        processes.close()


class Twice(nn.Module):
    """Doubles; the last one adds up."""

    def forward(self, inputs: Tensor, shared: BatchContext, finish: Finish | None = None) -> Any:
        doubled = 2.0 * inputs.double()
        return doubled if finish is None else finish(doubled.sum(), NO_HEAD)


@attrs.frozen
class Anywhere:
    """All forwards and then all backwards, on whatever ranks the stages lie."""

    ranks_of_stages: tuple[int, ...]

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        return self.ranks_of_stages

    def program(self, ranks: int, microbatches: int) -> Program:
        stages = range(len(self.ranks_of_stages))
        forwards = [Action(stage, "F", number) for number in range(microbatches) for stage in stages]
        backwards = [Action(stage, "B", number) for number in range(microbatches) for stage in reversed(stages)]
        lines = [
            [action for action in (*forwards, *backwards) if self.ranks_of_stages[action.stage] == rank]
            for rank in range(ranks)
        ]
        return Program.from_rank_programs(lines, self.ranks_of_stages)


def test_stages_hand_over_between_any_two_ranks() -> None:
    """Consecutive stages need not lie on neighbours of a ring: 0 to 2, 2 to 1 and 1 to 3 work as well."""
    expected = sum(float((2.0**8 * batch.tokens.double()).sum()) ** 2 for batch in batches())
    assert sum(run_ranks(hops, 4, (0, 2, 1, 3, 0, 2, 1, 3))) == pytest.approx(expected, rel=1e-12)


def test_actions_are_ranges_of_a_profile() -> None:
    """A profile has all the program's actions once, by their notation; without a profiler there are no ranges."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        pipelines.steps([("gpipe", 4, False, False, "plain")], layers=2)
    names = [event.name for event in profile.events() if event.is_user_annotation]
    validation = ["0F0", "0F1", "0F2"]
    assert sorted(names) == sorted([f"0{op}{number}" for op in "FB" for number in range(4)] + validation)
