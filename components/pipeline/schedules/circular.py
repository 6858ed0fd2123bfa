"""
The circular pipeline: microbatches pass through all ranks in a loop, one repeat after another.

MaxText (Google, github.com/AI-Hypercomputer/maxtext), `layers/pipeline.py`. One program for all ranks steps through
`repeats * microbatches + ranks - 1` iterations and goes back through them in reverse, as the looped breadth-first
pipeline with a stage on each rank for every repeat. `pipeline.circular.executor` runs it. Its stages are layers alone:
each rank has the embedding and the head, too, for its share of the microbatches, so that no rank waits for the head of
the last one. With `pipeline_parallel_layers` the layers beyond that number are outside of the pipeline, as in MaxText:
each rank has them all, and computes them data-parallel, for its share of the microbatches.
"""

from typing import ClassVar

from drawloom.components.pipeline.program.builders import Row, RowSchedule, breadth_first, loop
from drawloom.graph import UserError, between, component, setting


@component(impact="safe")
class Circular(RowSchedule):
    """MaxText's circular pipeline: in each repeat all microbatches pass through all ranks once."""

    newest_first: ClassVar[bool] = True
    embeds_on_every_rank: ClassVar[bool] = True
    stages_per_rank: int = setting(default=2, check=between(1, 1001), doc="repeats, each a stage on every rank")
    pipeline_parallel_layers: int | None = setting(
        default=None,
        check=between(1, 10_001),
        doc="the first layers of the model, which stages share; the others are on every rank, which computes them for "
        "its share of the microbatches; default: all layers are in stages",
    )

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage."""
        return loop(ranks, self.stages_per_rank)

    def layers_in_stages(self, ranks: int, layers: int) -> int:
        """Return how many of a model's layers all stages have together; UserError if that can't be."""
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

    def row(self, rank: int, ranks: int, microbatches: int) -> Row:
        """The op codes of one rank, in order."""
        return breadth_first(self.stages_per_rank, microbatches)
