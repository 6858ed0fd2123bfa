"""The search for policies."""

import numpy as np

from drawloom.components.pipeline.program.builders import assign_stages_in_vee
from drawloom.components.pipeline.program.list_scheduling import SchedulingTask, compute_makespan
from drawloom.components.pipeline.program.policy_search import STARTS, halve_task_size, search_best_policy
from drawloom.components.pipeline.program.timing import CostTable


def task(ranks: int, microbatches: int) -> SchedulingTask:
    """Return a task with a costly last stage and the memory of 1F1B."""
    costs = CostTable(comm=0.25, lengths=np.outer([*[1.0] * (2 * ranks - 1), 1.6], [1.0, 2.0, 1.0, 1.0]))
    return SchedulingTask(assign_stages_in_vee(ranks), microbatches, costs, (1.0,) * (2 * ranks), 2.0 * ranks)


def test_the_search_improves_its_starts() -> None:
    """The result is shorter than all starting policies."""
    small = task(4, 12)
    assert compute_makespan(small, search_best_policy(small)) < min(
        compute_makespan(small, policy) for policy in STARTS
    )


def test_a_halved_task_has_the_ends_of_the_whole() -> None:
    """Half of the ranks, microbatches and memory are left, the first and the last stage with their costs."""
    half = halve_task_size(task(16, 64))
    assert (half.stage_to_rank, half.microbatches, half.limit) == (assign_stages_in_vee(8), 32, 16.0)
    assert isinstance(half.costs, CostTable) and half.costs.lengths[:, 0].tolist() == [*[1.0] * 15, 1.6]


def test_large_tasks_take_a_bounded_number_of_trials() -> None:
    """A task with more actions than the search may schedule gets the best policy for a smaller task."""
    assert search_best_policy(task(128, 512)) == search_best_policy(halve_task_size(task(128, 512)))
