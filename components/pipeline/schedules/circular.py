"""
Circular pipeline: microbatches pass through all ranks in a loop, one repeat after another.

MaxText (Google, github.com/AI-Hypercomputer/maxtext), `layers/pipeline.py`. One program for all ranks steps through
`repeats * microbatches + ranks - 1` iterations and goes back through them in reverse, as the looped breadth-first
pipeline with a stage on every rank for every repeat. `pipeline.circular.executor` runs it. Its stages consist of layers
only: every rank also has the embedding and the head, for its share of the microbatches, so that no rank waits for the
head of the last rank. As in MaxText, layers beyond `pipeline_parallel_layers` are outside of the pipeline: every rank
has all of them, and computes them data-parallel, for its share of the microbatches.
"""

from typing import ClassVar

from drawloom import UserError, between, component, setting
from drawloom.components.pipeline.program.builders import (
    OpCodes,
    OpCodeSchedule,
    assign_stages_in_loop,
    build_breadth_first_op_codes,
)


@component(impact="safe")
class Circular(OpCodeSchedule):
    """Circular pipeline of MaxText: in every repeat, all microbatches pass through all ranks once."""

    backward_newest_first: ClassVar[bool] = True
    embeds_on_every_rank: ClassVar[bool] = True
    stages_per_rank: int = setting("repeats, with one stage per rank and repeat", default=2, check=between(1, 1001))
    pipeline_parallel_layers: int | None = setting(
        "number of first layers that are partitioned into stages; every rank has the other layers, and computes "
        "them for its share of the microbatches; default: all layers are in stages",
        default=None,
        check=between(1, 10_001),
    )

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        return assign_stages_in_loop(ranks, self.stages_per_rank)

    def get_pipelined_layer_count(self, ranks: int, layers: int) -> int:
        """Return the number of a model's layers in all stages; UserError if the setting does not fit the model."""
        inside, stages = self.pipeline_parallel_layers or layers, ranks * self.stages_per_rank
        if inside > layers:
            raise UserError(
                f"pipeline_parallel_layers = {inside} is more than the model's {layers} layers; write a multiple of "
                f"{stages}, or leave it out",
                2,
            )
        if inside < stages <= layers:
            raise UserError(
                f"pipeline_parallel_layers = {inside} leaves some of {stages} stages ({ranks} ranks with "
                f"{self.stages_per_rank} each) without a layer; write {stages} or more",
                2,
            )
        return inside

    def build_rank_op_codes(self, rank: int, ranks: int, microbatches: int) -> OpCodes:
        return build_breadth_first_op_codes(self.stages_per_rank, microbatches)
