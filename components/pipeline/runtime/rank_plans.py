"""This rank's actions for training steps and for forward passes, by the number of microbatches."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from drawloom.components.pipeline.program.builders import build_forward_only_program, build_program_with_neighbours
from drawloom.components.pipeline.program.lowering import (
    check_ranks_agree_on_program,
    insert_shard_actions,
    lower_to_rank_program,
)
from drawloom.ports import (
    Action,
    Device,
    Mesh,
    PassFeature,
    Program,
    RankProgram,
    Schedule,
    Stage,
    Stages,
    iterate_actions,
)

if TYPE_CHECKING:
    from drawloom.components.pipeline.runtime.offloads import Offloads


@attrs.frozen
class TrainingPlan:
    """
    Plan for a training step: this rank's actions, its stages, the stages with a split backward pass, and the features.
    """

    actions: list[Action]
    split: frozenset[int]
    stages: list[Stage]
    features: list[PassFeature]


@attrs.define
class RankPlans:
    """Plans for this rank. `lower` returns the rank's part of the schedule's program, with messages."""

    schedule: Schedule
    mesh: Mesh
    device: Device
    features: Sequence[PassFeature]
    stage_to_rank: tuple[int, ...]
    lower: Callable[[Program], RankProgram]
    _forward: dict[tuple[Stages, int], list[Action]] = attrs.field(init=False, factory=dict)
    _offloads: "Offloads | None" = attrs.field(init=False, default=None)

    def plan_training(self, microbatches: int, stages: Stages) -> TrainingPlan:
        """Return the plan for a step with this many microbatches, and compare it between ranks."""
        rank, ranks = self.mesh.indices.pipeline, self.mesh.sizes.pipeline
        program = build_program_with_neighbours(self.schedule, rank, ranks, microbatches)
        check_ranks_agree_on_program(program, rank, self.mesh.pipeline_group)
        for feature in self.features:
            program = feature.change_program(program)
        policies = dict(enumerate(program.recompute))
        local = [attrs.evolve(stage, recompute=policies.get(stage.index, stage.recompute)) for stage in stages.local]
        actions = _insert_shard_actions(self.lower(program), local)
        split = frozenset(action.stage for action in actions if action.op == "I")
        return TrainingPlan(actions, split, local, [*self._list_offloading_features(program), *self.features])

    def _list_offloading_features(self, program: Program) -> list[PassFeature]:
        """Return the feature for moves of activations; a program without any does not import it."""
        if not program.offloaded:
            return []
        from drawloom.components.distributed.transfers import DeviceTransfers
        from drawloom.components.pipeline.runtime.offloads import Offloading, Offloads

        self._offloads = self._offloads or Offloads(DeviceTransfers(self.device.device))
        return [Offloading(self._offloads, program.offloaded)]

    def plan_forward(self, microbatches: int, stages: Stages) -> list[Action]:
        """Return this rank's forward-only actions for this many microbatches; built once."""
        if (stages, microbatches) not in self._forward:
            program = build_forward_only_program(self.stage_to_rank, microbatches)
            line = lower_to_rank_program(program, self.mesh.indices.pipeline)
            self._forward[stages, microbatches] = _insert_shard_actions(line, stages.local)
        return self._forward[stages, microbatches]

    def close(self) -> None:
        """Release host memory for activations."""
        if self._offloads is not None:
            self._offloads.transfers.close()


def _insert_shard_actions(line: RankProgram, local: Sequence[Stage]) -> list[Action]:
    """Return this rank's actions, also on shards; an overlap's parts follow one another."""
    shards = {stage.index: stage.shards for stage in local if stage.shards is not None}
    gathered = {index for index, shard in shards.items() if not shard.gathers_per_block}
    by_microbatch = {index for index, shard in shards.items() if shard.reduces_per_microbatch}
    return [*iterate_actions(insert_shard_actions(line, gathered, shards.keys(), by_microbatch))]
