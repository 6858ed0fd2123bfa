"""
Greedy: weight gradients fill the bubbles, for measured costs of ops and messages.

The idea is that of the automatic schedules in Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024,
section 3. Forwards and input gradients are in the order of DualPipeV, which is the best for most costs; with less
memory than that order needs, a rank runs whatever is ready, the most urgent first.
"""

from drawloom.components.pipeline.program.builders import vee
from drawloom.components.pipeline.program.list_scheduling import fill_bubbles, list_schedule
from drawloom.components.pipeline.program.timing import Costs
from drawloom.components.pipeline.schedules.dual_pipe_v import DualPipeV
from drawloom.components.ports.program import Program
from drawloom.graph import above, at_least, component, setting


@component(impact="safe")
class Greedy:
    """A schedule for measured costs and a memory limit, on a V. Costs are of one stage and microbatch, in any unit."""

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
        """Two: one on the way down the V, one on the way up."""
        return 2

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage."""
        return vee(ranks)

    def program(self, ranks: int, microbatches: int) -> Program:
        """The actions of every rank, in order."""
        costs = Costs(self.forward, self.backward_input, self.backward_weight, comm=self.comm)
        # DualPipeV holds at most 2 p + 1 stage-microbatches on a rank.
        enough = 2 * ranks + 1
        limit = enough if self.memory is None else 2 * self.memory
        if limit < enough:
            return list_schedule(ranks, microbatches, limit, costs)
        return fill_bubbles(DualPipeV().program(ranks, microbatches), limit, costs)
