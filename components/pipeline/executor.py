"""Carries a rank's line of the schedule's program out, on this rank's stages; on one rank, the plain training loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.pipeline.program.builders import forward_only
from drawloom.components.pipeline.program.lowering import lower
from drawloom.components.pipeline.runtime.layer_partition import misfits
from drawloom.components.pipeline.runtime.p2p import P2PBuffers
from drawloom.components.pipeline.runtime.program_runner import MicrobatchInputs, ProgramRunner
from drawloom.components.pipeline.runtime.stage_runner import StageRunner
from drawloom.components.pipeline.state.handler import PipelineStateHandler
from drawloom.components.ports.data import Batch
from drawloom.components.ports.distributed import Device, Mesh, Neighbours, P2PChannel
from drawloom.components.ports.model import BatchContext, StageInputs, TrainableStages
from drawloom.components.ports.pipeline import Loss, Losses, Schedule, Stack
from drawloom.components.ports.program import RankProgram, flat
from drawloom.components.storage.pytree import transform
from drawloom.graph import Problem, component
from drawloom.graph.build.node import NodeView


@component
class Executor:
    """Runs programs on this rank's stages; on one rank, that is the plain training loop."""

    stages: TrainableStages
    boundaries: StageInputs
    schedule: Schedule
    objective: Loss
    mesh: Mesh
    neighbours: Neighbours
    device: Device
    _links: Mapping[int, P2PChannel] = attrs.field(init=False, factory=dict)
    _training: dict[int, RankProgram] = attrs.field(init=False, factory=dict)
    _forward: dict[int, RankProgram] = attrs.field(init=False, factory=dict)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Schedule, mesh and model go together."""
        for mesh, schedule, stages in zip(*map(node.neighbours, ("mesh", "schedule", "stages")), strict=True):
            for model in stages.neighbours("model"):
                yield from misfits(schedule, mesh, model)
        for stages, loss in zip(node.neighbours("stages"), node.neighbours("objective"), strict=True):
            for other in stages.neighbours("loss"):
                if other.name != loss.name:
                    text = f"the stages hold the parameters of [{other.name}], and [{loss.name}] is computed"
                    yield node.problem("objective", text, f'write objective = "@{other.name}"')

    def open(self) -> None:
        """Connect this rank to those that its stages send to or receive from."""
        owners = self.schedule.stage_to_rank(self.mesh.size("pipeline"))
        self._links = self.neighbours.links("pipeline", {hop for hop in pairwise(owners) if hop[0] != hop[1]})

    def train(self, microbatches: Sequence[Batch]) -> Losses:
        """Forward and backward of every microbatch; gradients of the sum of losses are added to the parameters'."""
        line = self._training_line(len(microbatches))
        passage = self._passage([self._load(batch) for batch in microbatches], split_stages(line))
        self.stages.cast_weights()
        passage.run(line)
        self.stages.hand_over_gradients()
        return passage.losses(self.device.device)

    def evaluate(self, microbatches: Iterator[Batch]) -> Losses:
        """Forward of every microbatch; nothing is kept of them but their losses."""
        passage = self._passage([self._load(batch) for batch in microbatches])
        self.stages.cast_weights()
        with torch.inference_mode():
            passage.run(self._forward_line(len(passage.microbatches)))
        return passage.losses(self.device.device)

    def infer(self, tokens: Tensor, shared: BatchContext) -> Tensor | None:
        """The model's output for one microbatch, on the rank that holds the last stage; None on others."""
        found: dict[int, Tensor] = {}
        self.infer_each([(tokens, shared)], found.__setitem__)
        return found.get(0)

    def infer_each(
        self, microbatches: Sequence[tuple[Tensor, BatchContext]], each_output: Callable[[int, Any], None]
    ) -> None:
        """Hand the output of each microbatch out as soon as it is there, on the rank that holds the last stage."""
        passage = self._passage([MicrobatchInputs(*self._moved(microbatch)) for microbatch in microbatches])
        passage.each_output = each_output
        self.stages.cast_weights(only_if_changed=True)
        with torch.inference_mode():
            passage.run(self._forward_line(len(microbatches)))

    def _passage(self, loads: Sequence[MicrobatchInputs], split: Set[int] = frozenset()) -> ProgramRunner:
        state = PipelineStateHandler(dict.fromkeys(("loss", "weight", "sums"), Stack()), max(1, len(loads)))
        works = {
            stage.index: StageRunner(stage, self.objective, state, split=stage.index in split)
            for stage in self.stages.local
        }
        return ProgramRunner(works, loads, self.boundaries, P2PBuffers(self._links, self.device.device), state)

    def _load(self, batch: Batch) -> MicrobatchInputs:
        moved: Batch = self._moved(batch)
        return MicrobatchInputs(*self.objective.inputs(moved), moved)

    def _moved(self, tree: Any) -> Any:
        where = self.device.device
        if where.type == "cpu":
            return tree  # where everything is already
        return transform(lambda leaf: leaf.to(where, non_blocking=True) if isinstance(leaf, Tensor) else leaf, tree)

    def _training_line(self, microbatches: int) -> RankProgram:
        if microbatches not in self._training:
            program = self.schedule.program(self.mesh.size("pipeline"), microbatches)
            self._training[microbatches] = lower(program, self.mesh.index("pipeline"))
        return self._training[microbatches]

    def _forward_line(self, microbatches: int) -> RankProgram:
        if microbatches not in self._forward:
            program = forward_only(self.schedule.stage_to_rank(self.mesh.size("pipeline")), microbatches)
            self._forward[microbatches] = lower(program, self.mesh.index("pipeline"))
        return self._forward[microbatches]


def split_stages(line: RankProgram) -> set[int]:
    """The stages that a line takes backward in two parts."""
    return {action.stage for action in flat(line) if action.op == "I"}
