"""
Local search for the list scheduling policy with the shortest program.

A policy means the same for pipelines of any size, so most policies are tried on a smaller pipeline with the same shape.
The best starting points are changed at random in one or two numbers, and a change is kept unless it is worse. The
random seed is fixed, and the trial count only depends on the size, not on a clock: every rank finds the same program.
"""

import random
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import attrs

from drawloom.components.pipeline.program.list_scheduling import (
    FORWARDS_FIRST,
    PriorityPolicy,
    SchedulingTask,
    compute_makespan,
)

WAVE = PriorityPolicy(down=(0.4, 0.25), up=(0.2, 0.4), turn=0.0, pace=1.2, spared=(0.0, 0.5), patience=0.25)
"""Policy with a period between microbatches."""

STARTS = (
    FORWARDS_FIRST,
    attrs.evolve(FORWARDS_FIRST, spared=(0.0, 0.3)),
    attrs.evolve(FORWARDS_FIRST, spared=(0.0, 0.4)),
    attrs.evolve(FORWARDS_FIRST, spared=(0.0, 0.0)),
    WAVE,
    attrs.evolve(WAVE, spared=(0.0, 0.0)),
    PriorityPolicy(down=(0.2, 0.2), up=(0.2, 0.2), turn=0.0, pace=1.0, spared=(0.0, 0.0)),
)

MAX_DIRECT_ACTIONS = 2_000
"""Actions above which a pipeline is first searched with half as many ranks."""

TRIALS, MAX_SCHEDULED_ACTIONS = 240, 300_000
"""Limits of policies tried per size, and of actions scheduled in all, which take about a second."""

BEAM = 3
"""Number of best policies that are changed further, and of ways to recompute that are searched."""


def search_best_policy(
    task: SchedulingTask, starts: Sequence[PriorityPolicy] = STARTS, trials: int = TRIALS
) -> PriorityPolicy:
    """Search for the policy with the shortest makespan: from `starts`, with at most `trials` policies per size."""
    return _search_policies(task, starts, trials)[0]


def select_promising_tasks(tasks: Sequence[SchedulingTask]) -> list[SchedulingTask]:
    """Return the tasks (equal in size) with the shortest programs under two usual policies: BEAM, or 1 if large."""

    def find_shortest_makespan(task: SchedulingTask) -> float:
        while _count_actions(task) > MAX_DIRECT_ACTIONS and task.ranks >= 8:
            task = halve_task_size(task)
        return min(compute_makespan(task, policy) for policy in (FORWARDS_FIRST, WAVE))

    return sorted(tasks, key=find_shortest_makespan)[
        : BEAM if tasks and _count_actions(tasks[0]) <= MAX_DIRECT_ACTIONS else 1
    ]


def _search_policies(task: SchedulingTask, starts: Sequence[PriorityPolicy], trials: int) -> list[PriorityPolicy]:
    """Return the best policies, the best first."""
    count = min(trials, MAX_SCHEDULED_ACTIONS // _count_actions(task))
    if _count_actions(task) <= MAX_DIRECT_ACTIONS or task.ranks < 8:
        return _improve_policies(task, starts[: max(1, count)], count)
    policies = _search_policies(halve_task_size(task), starts, trials)
    # The best policy of the smaller task may not be the best here; a task that is too large keeps it.
    return _improve_policies(task, [*policies, *starts][:count], count) or policies


def halve_task_size(task: SchedulingTask) -> SchedulingTask:
    """Return the task with half as many ranks and microbatches, and half the memory."""
    count, last = task.ranks // 2, task.ranks - 1
    # The first and the last rank stay, because their stages have different costs.
    new_ranks = {round(number * last / (count - 1)): number for number in range(count)}
    stages = [stage for stage, owner in enumerate(task.stage_to_rank) if owner in new_ranks]
    half = SchedulingTask(
        tuple(new_ranks[task.stage_to_rank[stage]] for stage in stages),
        max(1, task.microbatches // 2),
        task.costs.select_stages(stages),
        tuple(task.activations[stage] for stage in stages),
        task.limit / 2,
        tuple(task.pending[stage] for stage in stages),
    )
    return attrs.evolve(half, limit=max(half.limit, half.microbatch_peak_memory))


def _improve_policies(task: SchedulingTask, starts: Sequence[PriorityPolicy], trials: int) -> list[PriorityPolicy]:
    """Improve policies by random changes, and return the best ones, the best first."""
    best = sorted(((compute_makespan(task, policy), policy) for policy in starts), key=itemgetter(0))[:BEAM]
    trials, chance = trials - len(starts), random.Random(0)
    for trial in range(trials):
        # First all of the best policies are changed in turn, then only the best one.
        index = trial % len(best) if trial < trials // 3 else 0
        policy = _change_policy_randomly(best[index][1], chance)
        length = compute_makespan(task, policy)
        if length <= best[index][0]:
            best[index] = length, policy
            best.sort(key=itemgetter(0))
    return [policy for _, policy in best]


def _change_policy_randomly(policy: PriorityPolicy, chance: random.Random) -> PriorityPolicy:
    """Return the policy with one or two numbers changed at random."""
    for _ in range(chance.choice((1, 1, 2))):
        name = chance.choice([*_CHANGES])
        policy = attrs.evolve(policy, **{name: _CHANGES[name](getattr(policy, name), chance)})
    return policy


def _change_one_number_randomly(numbers: tuple[float, float], chance: random.Random) -> tuple[float, float]:
    first, second = numbers
    return (
        (_change_number_randomly(first, chance), second)
        if chance.random() < 0.5
        else (first, _change_number_randomly(second, chance))
    )


def _change_number_randomly(number: float, chance: random.Random) -> float:
    """Return a random number near a number, or near its negative."""
    return chance.choice((number / 2, number * 0.8, number * 1.25, number * 2, -number)) + chance.uniform(-0.2, 0.2)


_CHANGES: dict[str, Callable[[Any, random.Random], Any]] = {
    "down": _change_one_number_randomly,
    "up": _change_one_number_randomly,
    "turn": _change_number_randomly,
    "pace": lambda _, chance: chance.choice((0.0, 0.5, 0.8, 1.0, 1.2)),
    "spared": lambda _, chance: (chance.uniform(-0.1, 0.5), chance.uniform(-0.1, 0.7)),
    "patience": lambda _, chance: chance.choice((0.0, 0.25, 0.5, 0.75, 1.0)),
}
"""Random changes by field of a policy, given its value."""


def _count_actions(task: SchedulingTask) -> int:
    return 3 * len(task.stage_to_rank) * task.microbatches
