"""
Interleaved 1F1B: several stages on each rank, one forward, one backward.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, section
2.2.2 and figure 4. The bubble is that of 1F1B divided by the number of stages on a rank. Rounds of microbatches need
not be equal: any number of microbatches will do.
"""

from drawloom.components.pipeline.program.builders import Row, RowSchedule, backward, interleaved, loop
from drawloom.graph import between, component, setting


@component(impact="safe")
class Interleaved1F1B(RowSchedule):
    """One forward, one backward, over several stages on each rank."""

    stages_per_rank: int = setting(default=2, check=between(1, 1001), doc="stages on each rank")

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage."""
        return loop(ranks, self.stages_per_rank)

    def row(self, rank: int, ranks: int, microbatches: int) -> Row:
        """The op codes of one rank, in order."""
        return interleaved(rank, ranks, self.stages_per_rank, microbatches, backward, lead=2)
