"""
List scheduling: a free rank runs the most urgent action that is ready and that its memory limit allows.

A rank has a queue of forwards and a queue of input gradients for each of its stages, each in the order of microbatches,
and runs the most urgent head that is ready. Weight gradients, on which no action depends, fill the bubbles: if no head
is ready, or memory is full, the rank runs the oldest pending one, unless a head will be ready soon.

What is urgent is a `Policy`, a few numbers for ranks and microbatches of any number. The idea is that of the building
blocks in Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024: how far ops of one microbatch are
apart determines how long activations live, and the schedule repeats that for each microbatch.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import attrs
import numpy as np

from drawloom.components.pipeline.program.timing import Costs
from drawloom.components.ports.program import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Program

NEVER = float("inf")

ROUNDING = 1e-9
"""By what part of a limit sums may be above it."""


@attrs.frozen
class Task:
    """
    What is to be scheduled: microbatches through placed stages, whose activations have sizes, under a memory limit.

    A rank holds a stage's `activations` of a microbatch from its forward until its input gradients, and from then on
    what is `pending` until its weight gradients, as much if that is left out; at most `limit` in all. With `least`
    there is always a schedule.
    """

    stage_to_rank: tuple[int, ...]
    microbatches: int
    costs: Costs
    activations: tuple[float, ...]
    limit: float
    pending: tuple[float, ...] = attrs.field(default=attrs.Factory(lambda self: self.activations, takes_self=True))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return max(self.stage_to_rank) + 1

    @property
    def least(self) -> float:
        """The most that a rank holds of one microbatch in all its stages."""
        held = [0.0] * self.ranks
        for owner, size in zip(self.stage_to_rank, self.activations, strict=True):
            held[owner] += size
        return max(size + self.growth(rank) for rank, size in enumerate(held))

    def growth(self, rank: int) -> float:
        """By how much the input gradients of one of a rank's stages increase at most what it holds."""
        sizes = zip(self.stage_to_rank, self.activations, self.pending, strict=True)
        return max(0.0, *(pending - size for owner, size, pending in sizes if owner == rank))

    @property
    def period(self) -> float:
        """The time of one microbatch on the busiest rank."""
        busy = [0.0] * self.ranks
        for stage, owner in enumerate(self.stage_to_rank):
            busy[owner] += sum(self.costs.length(op, stage) for op in "FIW")
        return max(busy)


@attrs.frozen
class Policy:
    """
    What is urgent, in numbers that mean the same for any number of ranks; times are in periods of the busiest rank.

    The action with the earliest due time is the most urgent. `down` is by how much a forward is due later than that of
    the stage before, in the first and in the second half of the stages, `up` the same for input gradients, which run
    through the stages in reverse, `turn` times the number of stages lies between the last forward and the first input
    gradient, and `pace` between two microbatches. A stage leaves a share of its rank's limit to the rank's later
    stages: `spared` on the first and on the last rank. A rank waits rather than run weight gradients if a head is
    ready within `patience` times their duration.
    """

    down: tuple[float, float] = (-1.0, -1.0)
    up: tuple[float, float] = (-1.0, -1.0)
    turn: float = 4.0
    pace: float = 0.0
    spared: tuple[float, float] = (0.0, 0.5)
    patience: float = 0.5

    def due(self, stages: int) -> tuple[list[float], list[float]]:
        """For each stage, when the forward and the input gradient of the first microbatch are due, in periods."""
        forwards, inputs, now = [0.0] * stages, [0.0] * stages, 0.0
        for stage in range(stages):
            forwards[stage] = now
            now += self.down[stage * 2 // stages]
        now += self.turn * stages
        for stage in reversed(range(stages)):
            inputs[stage] = now
            now += self.up[stage * 2 // stages]
        return forwards, inputs


FORWARDS_FIRST = Policy()
"""Forwards of later stages, then of earlier ones, then input gradients of earlier stages, then of later ones."""


@attrs.define(eq=False)
class _Queue:
    """Forwards or input gradients of one stage, in the order of microbatches, and when each can start."""

    stage: int
    op: int
    place: int  # of the stage among those of its rank
    cost: float
    weights: float  # the cost of weight gradients of this stage
    due: float
    size: float  # of a microbatch's activations
    growth: float  # of what its input gradients leave in their place
    most: float  # that this stage's activations may take
    rooms: list[
        float
    ]  # that the activations of this and all earlier stages of the rank may take, for it and each later
    ready: list[float] = attrs.field(factory=list)
    done: int = 0
    feeds: "_Queue | None" = None
    feeds_rank: int = -1
    delay: float = 0.0


@attrs.define(eq=False)
class _Rank:
    """A rank's queues, what it holds by stage, its pending weight gradients, when it is free, and what it has done."""

    queues: list[_Queue]
    held: list[float]
    limit: float
    pending: deque[_Queue] = attrs.field(factory=deque)
    free: float = 0.0
    done: list[int] = attrs.field(factory=list)  # 4 * stage + op


def list_schedule(task: Task, policy: Policy) -> Program:
    """The program in which every rank keeps to the policy; the costs of ops must be above 0."""
    ranks = _dispatched(task, policy)
    bounds = np.cumsum([0, *(len(rank.done) for rank in ranks)])
    codes = np.concatenate([np.array(rank.done, dtype=np.int64) for rank in ranks])
    microbatch = np.zeros_like(codes)
    # The n-th action of a stage and op is that of microbatch n.
    microbatch[np.argsort(codes, kind="stable")] = np.tile(np.arange(task.microbatches), 3 * len(task.stage_to_rank))
    joined = np.zeros(len(codes), dtype=bool)
    return Program(
        task.stage_to_rank,
        task.microbatches,
        bounds,
        stage=codes // 4,
        op=codes % 4,
        microbatch=microbatch,
        overlaps_previous=joined,
    )


def peak_activations(
    program: Program, activations: Sequence[float], pending: Sequence[float] | None = None
) -> list[float]:
    """
    By rank, the peak of `activations`, those of each stage, between forwards and weight gradients.

    From input gradients on they are what is `pending`, if that is given.
    """
    size, left = (np.array(each)[program.stage] for each in (activations, activations if pending is None else pending))
    change = np.choose(program.op, [size, -size, left - size, -left])
    return [float(change[program.rows(rank)].cumsum().max(initial=0.0)) for rank in range(program.ranks)]


def makespan(task: Task, policy: Policy) -> float:
    """How long the program of `list_schedule` takes."""
    return max(rank.free for rank in _dispatched(task, policy))


def _dispatched(task: Task, policy: Policy) -> list[_Rank]:
    """The ranks with all that they have done."""
    ranks = _ranks(task, policy)
    pace = policy.pace * task.period
    # Times that differ by rounding errors are the same.
    grain = 1e-9 * task.period
    events = [(0.0, number) for number in range(len(ranks))]  # when which rank may have something to do
    while events:
        now, number = heapq.heappop(events)
        rank = ranks[number]
        if now < rank.free:
            continue
        queue, soon = _most_urgent(rank, now + grain, pace)
        if queue is not None:
            end = now + queue.cost
            _run(rank, queue)
            if queue.feeds is not None:
                queue.feeds.ready.append(end + queue.delay)
                # A rank that is busy until later looks at its queues then.
                if ranks[queue.feeds_rank].free <= end + queue.delay and queue.feeds_rank != number:
                    heapq.heappush(events, (end + queue.delay, queue.feeds_rank))
        elif rank.pending and soon - now + grain >= policy.patience * rank.pending[0].weights:
            end = now + rank.pending[0].weights
            _run_weight_gradients(rank)
        else:
            if soon < NEVER:
                heapq.heappush(events, (soon, number))
            continue
        rank.free = end
        heapq.heappush(events, (end, number))
    return ranks


def _ranks(task: Task, policy: Policy) -> list[_Rank]:
    """The ranks with their queues, each linked to the one that it feeds."""
    owners, costs = task.stage_to_rank, task.costs
    (due_forward, due_input), period = policy.due(len(owners)), task.period
    forwards, inputs = [], []
    local: list[list[int]] = [[] for _ in range(task.ranks)]
    for stage, owner in enumerate(owners):
        local[owner].append(stage)
    for stage, owner in enumerate(owners):
        place = local[owner].index(stage)
        size = task.activations[stage]
        most, rooms = _limits(task, policy, local[owner], place)
        forward, back, weights = (costs.length(op, stage) for op in "FIW")
        queue = partial(
            _Queue,
            stage=stage,
            place=place,
            weights=weights,
            size=size,
            growth=task.pending[stage] - size,
            most=most,
            rooms=rooms,
        )
        forwards.append(queue(op=FORWARD, cost=forward, due=due_forward[stage] * period))
        inputs.append(queue(op=BACKWARD_INPUT, cost=back, due=due_input[stage] * period))
    for one, other in [*pairwise(forwards), (forwards[-1], inputs[-1]), *pairwise(reversed(inputs))]:
        one.feeds, one.feeds_rank = other, owners[other.stage]
        one.delay = costs.comm if owners[one.stage] != owners[other.stage] else 0.0
    forwards[0].ready = [0.0] * task.microbatches
    limit = task.limit * (1 + ROUNDING)
    return [_Rank([q for s in own for q in (forwards[s], inputs[s])], [0.0] * len(own), limit) for own in local]


def _limits(task: Task, policy: Policy, own: list[int], place: int) -> tuple[float, list[float]]:
    """Of one of a rank's own stages, the limits `most` and `rooms` of a queue."""
    sizes = [task.activations[stage] for stage in own]
    # Without memory for what input gradients leave, forwards would wait for them, and they for memory.
    limit = task.limit * (1 + ROUNDING) - task.growth(task.stage_to_rank[own[0]])
    spared, last = policy.spared
    spared += (last - spared) * task.stage_to_rank[own[place]] / task.ranks
    most = max(sizes[place], limit * (1 - spared)) if place < len(own) - 1 else limit
    # Without memory for the later stages, activations of earlier ones would never be freed.
    return most, [limit - sum(sizes[later:]) for later in range(place + 1, len(own) + 1)]


def _most_urgent(rank: _Rank, now: float, pace: float) -> tuple[_Queue | None, float]:
    """The queue whose head is ready and the most urgent; and when the next head that memory allows will be ready."""
    found, first, soon = None, NEVER, NEVER
    for queue in rank.queues:
        done = queue.done
        if done == len(queue.ready) or not (
            _fits(rank.held, queue)
            if queue.op == FORWARD
            else queue.growth <= 0.0 or sum(rank.held) + queue.growth <= rank.limit
        ):
            continue
        if (ready := queue.ready[done]) > now:
            if ready < soon:
                soon = ready
        elif (due := queue.due + done * pace) < first:
            found, first = queue, due
    return found, soon


def _fits(held: list[float], queue: _Queue) -> bool:
    """Whether the limits leave memory for the head of a queue of forwards."""
    size, place = queue.size, queue.place
    if held[place] + size > queue.most:
        return False
    total = sum(held[:place]) + size
    for stage, room in enumerate(queue.rooms, place):
        total += held[stage]
        if total > room:
            return False
    return True


def _run(rank: _Rank, queue: _Queue) -> None:
    """Run the head of a queue."""
    rank.done.append(4 * queue.stage + queue.op)
    queue.done += 1
    if queue.op == FORWARD:
        rank.held[queue.place] += queue.size
    else:
        rank.held[queue.place] += queue.growth
        rank.pending.append(queue)


def _run_weight_gradients(rank: _Rank) -> None:
    """Run the oldest pending weight gradients."""
    queue = rank.pending.popleft()
    rank.held[queue.place] -= queue.size + queue.growth
    rank.done.append(4 * queue.stage + BACKWARD_WEIGHT)
