"""
The circular pipeline: microbatches run round and round through all ranks, one repeat after the other.

MaxText (Google, github.com/AI-Hypercomputer/maxtext), `layers/pipeline.py`. Its one program for all ranks steps through
`repeats * microbatches + ranks - 1` iterations and goes back through them in reverse, which makes it the looped
breadth-first pipeline with a stage on each rank for every repeat. Unlike the single program, this one takes any number
of microbatches.
"""

from drawloom.components.pipeline.program.builders import breadth_first, loop
from drawloom.components.ports.program import Program
from drawloom.graph import at_least, component, setting


@component(impact="safe")
class Circular:
    """MaxText's circular pipeline: each repeat takes all microbatches round once."""

    stages_per_rank: int = setting(default=2, check=at_least(1), doc="repeats, each a stage on every rank")

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """For each stage the rank that holds it."""
        return loop(ranks, self.stages_per_rank)

    def program(self, ranks: int, microbatches: int) -> Program:
        """What each rank computes, in order."""
        return breadth_first(self.stage_to_rank(ranks), ranks, microbatches)
