"""Carries a rank's program out: forwards and backwards of its stages, in the order of the program."""

from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor

from drawloom.components.ports.data import Batch
from drawloom.components.ports.distributed import Device, Mesh
from drawloom.components.ports.model import Stage, Stages
from drawloom.components.ports.pipeline import Losses, Objective, Schedule
from drawloom.graph import component


@component
class Executor:
    """Runs programs on this rank's stages; on one rank, that is the plain training loop."""

    stages: Stages
    schedule: Schedule
    objective: Objective
    mesh: Mesh
    device: Device

    def train(self, microbatches: Sequence[Batch]) -> Losses:
        """Forward and backward of every microbatch; gradients of the sum of losses are added to the parameters'."""
        program = self.schedule.program(self.mesh.size("pipeline"), len(microbatches))
        work = _Pass(self.stages.local, self.objective, [self._moved(batch) for batch in microbatches])
        for action in program[self.mesh.index("pipeline")]:
            if action.work == "F":
                work.forward(action.stage, action.microbatch)
            else:
                work.backward(action.stage, action.microbatch)
        return work.losses(self.device.device)

    def evaluate(self, microbatches: Iterator[Batch]) -> Losses:
        """Forward of every microbatch, one after another; nothing is kept of them but their losses."""
        sums = Losses(*torch.zeros(2, dtype=torch.float64, device=self.device.device))
        with torch.inference_mode():
            for batch in microbatches:
                work = _Pass(self.stages.local, self.objective, [self._moved(batch)])
                for stage in self.stages.local:
                    work.forward(stage.index, 0)
                sums = _add(sums, work.losses(self.device.device))
        return sums

    def _moved(self, batch: Batch) -> Batch:
        tensors = attrs.asdict(batch, recurse=False)
        return Batch(**{name: tensor.to(self.device.device, non_blocking=True) for name, tensor in tensors.items()})


def _add(one: Losses, other: Losses) -> Losses:
    return Losses(one.total + other.total, one.weight + other.weight)


@attrs.define(eq=False)
class _Pass:
    """One pass over microbatches: what lives between a forward and its backward, by stage and microbatch."""

    stages: Sequence[Stage]
    objective: Objective
    batches: list[Batch]
    _inputs: dict[tuple[int, int], Tensor] = attrs.field(factory=dict)
    _outputs: dict[tuple[int, int], Tensor] = attrs.field(factory=dict)
    _losses: dict[int, tuple[Tensor, Tensor]] = attrs.field(factory=dict)

    def forward(self, index: int, microbatch: int) -> None:
        """Run a stage on what the stage before it gave, or on the batch."""
        stage = next(stage for stage in self.stages if stage.index == index)
        batch = self.batches[microbatch]
        tokens, shared = self.objective.inputs(batch)
        given = tokens if index == 0 else self._hand_over(index, microbatch)
        output = stage.module(given, shared)
        if index == stage.count - 1:
            loss, weight = self.objective.loss(output, batch)
            self._losses[microbatch] = (loss.detach(), weight.detach())
            output = loss
        self._outputs[index, microbatch] = output

    def _hand_over(self, index: int, microbatch: int) -> Tensor:
        """The output of the stage before, cut from its graph so that each stage goes backward by itself."""
        output = self._outputs[index - 1, microbatch]
        given = self._inputs[index, microbatch] = output.detach().requires_grad_(output.requires_grad)
        return given

    def backward(self, index: int, microbatch: int) -> None:
        """Run a stage backward from its loss, or from what the stage behind it found for its output."""
        output = self._outputs.pop((index, microbatch))
        behind = self._inputs.pop((index + 1, microbatch), None)
        if output.requires_grad:
            torch.autograd.backward(output, None if behind is None else behind.grad)

    def losses(self, device: torch.device) -> Losses:
        """The sums over microbatches, in their order; zero on a rank without the last stage."""
        total, weight = torch.zeros(2, dtype=torch.float64, device=device)
        for _, (loss, share) in sorted(self._losses.items()):
            total, weight = total + loss.double(), weight + share.double()
        return Losses(total, weight)
