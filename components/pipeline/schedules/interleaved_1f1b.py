"""
Interleaved 1F1B: several stages on each rank, one forward, one backward.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, section
2.2.2 and figure 4. The bubble is that of 1F1B divided by the number of stages on a rank. Rounds of microbatches need
not be equal: any number of microbatches will do.
"""

from drawloom.components.pipeline.program.builders import backward, build_program, interleaved, loop
from drawloom.components.ports.program import Program
from drawloom.graph import at_least, component, setting


@component(impact="safe")
class Interleaved1F1B:
    """One forward, one backward, over several stages on each rank."""

    stages_per_rank: int = setting(default=2, check=at_least(1), doc="stages on each rank")

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage."""
        return loop(ranks, self.stages_per_rank)

    def program(self, ranks: int, microbatches: int) -> Program:
        """The actions of every rank, in order."""
        rows = [interleaved(rank, ranks, self.stages_per_rank, microbatches, backward, lead=2) for rank in range(ranks)]
        return build_program(rows, self.stage_to_rank(ranks), microbatches)
