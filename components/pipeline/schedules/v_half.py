"""
V-Half: half the memory of 1F1B, with a smaller bubble.

Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, section 3, allows p + 2 stages' activations on
every rank. The paper's repeated building block leaves bubbles of 3 p - 5 slots at the ends; list scheduling with the
same memory, for ops of equal cost, leaves 3 p - 7 (3 p - 6 if p is odd). If
messages take time, a better order is searched within the same memory.
"""

import attrs

from drawloom import at_least, component, setting
from drawloom.components.pipeline.program.builders import assign_stages_in_vee
from drawloom.components.pipeline.program.list_scheduling import FORWARDS_FIRST, SchedulingTask, build_list_schedule
from drawloom.components.pipeline.program.policy_search import STARTS, search_best_policy
from drawloom.components.pipeline.program.timing import Costs
from drawloom.ports import Program


@component(impact="safe")
class VHalf:
    """V-Half: half the memory of 1F1B, with a small bubble."""

    comm: float = setting("time of a message, relative to the forward pass of a stage", default=0.0, check=at_least(0))

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        return assign_stages_in_vee(ranks)

    def program(self, ranks: int, microbatches: int) -> Program:
        limit = ranks + 2
        task = SchedulingTask(
            assign_stages_in_vee(ranks), microbatches, Costs(comm=self.comm), (1.0,) * (2 * ranks), limit
        )
        # The first rank's first stage may use all but one of the limit. This share falls to a half on the last rank,
        # like the lifetimes of its activations.
        even = attrs.evolve(FORWARDS_FIRST, spared=(1 / limit, 0.5))
        return build_list_schedule(task, search_best_policy(task, (even, *STARTS)) if self.comm else even)
