"""
Greedy: weight gradients wherever a rank would wait, for work and messages that cost what was measured.

The idea is that of the automatic schedules in Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024,
section 3. Forwards and input gradients go in the order of DualPipeV, which proved the best for most costs; where memory
is less than that order needs, whatever is ready goes, the most urgent first.
"""

from drawloom.components.pipeline.program.builders import vee
from drawloom.components.pipeline.program.costs import Costs
from drawloom.components.pipeline.program.list_scheduling import fill_bubbles, list_schedule
from drawloom.components.pipeline.schedules.dual_pipe_v import DualPipeV
from drawloom.components.ports.program import Program
from drawloom.graph import above, at_least, component, setting


@component(impact="safe")
class Greedy:
    """Made for measured costs and a given memory, on a V. Costs are of one stage and microbatch, in any unit."""

    forward: float = setting(default=1.0, check=above(0), doc="time of a forward")
    backward_input: float = setting(default=1.0, check=above(0), doc="time of the input gradients")
    backward_weight: float = setting(default=1.0, check=above(0), doc="time of the weight gradients")
    comm: float = setting(default=0.0, check=at_least(0), doc="time that a message is on its way")
    memory: int | None = setting(
        default=None,
        check=at_least(1),
        doc="microbatches whose activations a rank may hold in both its stages; half more than ranks if left out",
    )

    @property
    def stages_per_rank(self) -> int:
        """Down the V and up again."""
        return 2

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """For each stage the rank that holds it."""
        return vee(ranks)

    def program(self, ranks: int, microbatches: int) -> Program:
        """What each rank computes, in order."""
        costs = Costs(self.forward, self.backward_input, self.backward_weight, comm=self.comm)
        enough = 2 * ranks + 1
        limit = enough if self.memory is None else 2 * self.memory
        if limit < enough:
            return list_schedule(ranks, microbatches, limit, costs)
        return fill_bubbles(DualPipeV().program(ranks, microbatches), limit, costs)
