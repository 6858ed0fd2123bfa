"""
Local search for the policy of list scheduling that gives the shortest program.

A policy means the same for pipelines of any size, so most are tried on a smaller pipeline of the same shape. The best
few of some starting points are changed in one or two of their numbers at random; a change that is no worse is kept. The
random numbers have a fixed seed, and the number of trials follows from the size alone, not from a clock: every rank
finds the same program.
"""

import random
from collections.abc import Sequence

import attrs

from drawloom.components.pipeline.program.list_scheduling import FORWARDS_FIRST, Policy, Task, makespan

WAVE = Policy(down=(0.4, 0.25), up=(0.2, 0.4), turn=0.0, pace=1.2, spared=(0.0, 0.5), patience=0.25)
"""Microbatches follow one another a period apart."""

STARTS = (
    FORWARDS_FIRST,
    attrs.evolve(FORWARDS_FIRST, spared=(0.0, 0.3)),
    attrs.evolve(FORWARDS_FIRST, spared=(0.0, 0.4)),
    attrs.evolve(FORWARDS_FIRST, spared=(0.0, 0.0)),
    WAVE,
    attrs.evolve(WAVE, spared=(0.0, 0.0)),
    Policy(down=(0.2, 0.2), up=(0.2, 0.2), turn=0.0, pace=1.0, spared=(0.0, 0.0)),
)

FEW_ACTIONS = 2_000
"""A pipeline with more actions is searched on half as many ranks first."""

TRIALS, MOST_ACTIONS = 240, 300_000
"""The most policies that are tried for each size, and the most actions that are scheduled in all: about a second."""

KEPT = 3
"""How many of the best policies are changed further, and for how many ways to recompute they are searched for."""


def best_policy(task: Task, starts: Sequence[Policy] = STARTS, trials: int = TRIALS) -> Policy:
    """The policy with the shortest makespan that a search finds, which starts from others and tries `trials` a size."""
    return _found(task, starts, trials)[0]


def promising(tasks: Sequence[Task]) -> list[Task]:
    """Of tasks of one size, those whose programs are the shortest with usual policies: KEPT, or one of large tasks."""

    def length(task: Task) -> float:
        while _actions(task) > FEW_ACTIONS and task.ranks >= 8:
            task = halved(task)
        return min(makespan(task, policy) for policy in (FORWARDS_FIRST, WAVE))

    return sorted(tasks, key=length)[: KEPT if tasks and _actions(tasks[0]) <= FEW_ACTIONS else 1]


def _found(task: Task, starts: Sequence[Policy], trials: int) -> list[Policy]:
    """The best policies that are found, the best first."""
    here = min(trials, MOST_ACTIONS // _actions(task))
    if _actions(task) <= FEW_ACTIONS or task.ranks < 8:
        return _climb(task, starts[: max(1, here)], here)
    found = _found(halved(task), starts, trials)
    # What is best for the smaller task need not be so for this one; too large a task is left with it.
    return _climb(task, [*found, *starts][:here], here) or found


def halved(task: Task) -> Task:
    """The same task with half as many ranks and microbatches, and half of the memory."""
    count, last = task.ranks // 2, task.ranks - 1
    # The first and the last rank are among those that stay: they have the stages of other costs.
    kept = {round(number * last / (count - 1)): number for number in range(count)}
    stages = [stage for stage, owner in enumerate(task.stage_to_rank) if owner in kept]
    half = Task(
        tuple(kept[task.stage_to_rank[stage]] for stage in stages),
        max(1, task.microbatches // 2),
        task.costs.of_stages(stages),
        tuple(task.activations[stage] for stage in stages),
        task.limit / 2,
        tuple(task.pending[stage] for stage in stages),
    )
    return attrs.evolve(half, limit=max(half.limit, half.least))


def _climb(task: Task, starts: Sequence[Policy], trials: int) -> list[Policy]:
    """The best policies that are found from some others, the best first."""
    best = sorted(((makespan(task, policy), policy) for policy in starts), key=_length)[:KEPT]
    trials, chance = trials - len(starts), random.Random(0)
    for trial in range(trials):
        # Each of the best at first, then the best one alone.
        place = trial % len(best) if trial < trials // 3 else 0
        policy = _changed(best[place][1], chance)
        length = makespan(task, policy)
        if length <= best[place][0]:
            best[place] = length, policy
            best.sort(key=_length)
    return [policy for _, policy in best]


def _length(found: tuple[float, Policy]) -> float:
    return found[0]


def _changed(policy: Policy, chance: random.Random) -> Policy:
    """A policy that differs in one or two numbers."""
    for _ in range(chance.choice((1, 1, 2))):
        match chance.choice(("down", "up", "turn", "pace", "spared", "patience")):
            case "down":
                policy = attrs.evolve(policy, down=_one_moved(policy.down, chance))
            case "up":
                policy = attrs.evolve(policy, up=_one_moved(policy.up, chance))
            case "turn":
                policy = attrs.evolve(policy, turn=_moved(policy.turn, chance))
            case "pace":
                policy = attrs.evolve(policy, pace=chance.choice((0.0, 0.5, 0.8, 1.0, 1.2)))
            case "spared":
                policy = attrs.evolve(policy, spared=(chance.uniform(-0.1, 0.5), chance.uniform(-0.1, 0.7)))
            case "patience":
                policy = attrs.evolve(policy, patience=chance.choice((0.0, 0.25, 0.5, 0.75, 1.0)))
    return policy


def _one_moved(numbers: tuple[float, float], chance: random.Random) -> tuple[float, float]:
    first, second = numbers
    return (_moved(first, chance), second) if chance.random() < 0.5 else (first, _moved(second, chance))


def _moved(number: float, chance: random.Random) -> float:
    """A number of the same kind, somewhat larger or smaller, or of the other sign."""
    return chance.choice((number / 2, number * 0.8, number * 1.25, number * 2, -number)) + chance.uniform(-0.2, 0.2)


def _actions(task: Task) -> int:
    return 3 * len(task.stage_to_rank) * task.microbatches
