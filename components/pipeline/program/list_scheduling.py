"""
List scheduling: a free rank runs its most urgent ready action within its memory limit.

For every stage, a rank has a forward queue and an input gradient queue, both in microbatch order. It runs the most
urgent ready head. Weight gradients, on which no action depends, fill the bubbles: if no head is ready, or memory is
full, the rank runs the oldest pending weight gradients, unless a head will be ready soon.

A `PriorityPolicy` defines urgency by a few numbers, for any number of ranks and microbatches. It follows the building
blocks in Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024: the distance between a microbatch's
ops determines the activations' lifetime, and the schedule repeats these distances for every microbatch.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import attrs
import numpy as np

from drawloom.components.pipeline.program.timing import Costs
from drawloom.ports import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Program

NEVER = float("inf")

ROUNDING = 1e-9
"""Relative tolerance of memory limits and times for sums with rounding errors."""


@attrs.frozen
class SchedulingTask:
    """
    Scheduling problem: microbatches, stages with ranks and activation sizes, and a memory limit.

    A rank keeps a microbatch's stage `activations` from the forward pass until the input gradients, and `pending` from
    then on until the weight gradients; `pending` defaults to `activations`. The sum on a rank is at most `limit`. The
    limit `microbatch_peak_memory` always has a schedule.
    """

    stage_to_rank: tuple[int, ...]
    microbatches: int
    costs: Costs
    activations: tuple[float, ...]
    limit: float
    pending: tuple[float, ...] = attrs.field(default=attrs.Factory(lambda self: self.activations, takes_self=True))

    @property
    def ranks(self) -> int:
        """Return the rank count."""
        return max(self.stage_to_rank) + 1

    @property
    def microbatch_peak_memory(self) -> float:
        """Return one microbatch's peak memory, on the rank that needs most."""
        memory = [0.0] * self.ranks
        for owner, size in zip(self.stage_to_rank, self.activations, strict=True):
            memory[owner] += size
        return max(size + self.compute_max_input_grad_memory(rank) for rank, size in enumerate(memory))

    def compute_max_input_grad_memory(self, rank: int) -> float:
        """Return the most memory that computing a single stage's input gradients adds on a rank, at least 0."""
        sizes = zip(self.stage_to_rank, self.activations, self.pending, strict=True)
        return max(0.0, *(pending - size for owner, size, pending in sizes if owner == rank))

    @property
    def busiest_rank_microbatch_time(self) -> float:
        """Return the busiest rank's time for one microbatch."""
        busy = [0.0] * self.ranks
        for stage, owner in enumerate(self.stage_to_rank):
            busy[owner] += sum(self.costs.get_duration(op, stage) for op in "FIW")
        return max(busy)


@attrs.frozen
class PriorityPolicy:
    """
    Urgency of actions, in numbers independent of the size.

    The action with the earliest due time is the most urgent. Times are in periods of the busiest rank. A forward pass
    is due `down` later than the previous stage's, in the first and in the second half of the stages. `up` is the same
    delay for input gradients, which run through the stages in reverse. `turn` times the number of stages passes between
    the last forward pass and the first input gradient, and `pace` between two microbatches.

    A stage leaves a share of its rank's limit to the rank's later stages: `spared`, on the first and on the last rank.
    A rank waits instead of running weight gradients if a head is ready within `patience` times their duration.
    """

    down: tuple[float, float] = (-1.0, -1.0)
    up: tuple[float, float] = (-1.0, -1.0)
    turn: float = 4.0
    pace: float = 0.0
    spared: tuple[float, float] = (0.0, 0.5)
    patience: float = 0.5

    def compute_due_times(self, stages: int) -> tuple[list[float], list[float]]:
        """Return due times for the first microbatch's forward passes and input gradients by stage, in periods."""
        forwards, inputs, now = [0.0] * stages, [0.0] * stages, 0.0
        for stage in range(stages):
            forwards[stage] = now
            now += self.down[stage * 2 // stages]
        now += self.turn * stages
        for stage in reversed(range(stages)):
            inputs[stage] = now
            now += self.up[stage * 2 // stages]
        return forwards, inputs


FORWARDS_FIRST = PriorityPolicy()
"""Policy that prefers forward passes, first of later stages, over input gradients, first of earlier stages."""


@attrs.define(eq=False)
class _Queue:
    """Queue for a stage's forward passes or input gradients in microbatch order, with their ready times."""

    stage: int
    op: int
    position: int  # of the stage among the stages of its rank
    cost: float
    weight_gradient_cost: float  # of this stage
    due: float
    size: float  # of a microbatch's activations
    growth: float  # of memory by its input gradients
    limit: float  # of this stage's activations
    sum_limits: list[float]  # of the rank's activations up to this stage, and up to every later one
    ready: list[float] = attrs.field(factory=list)  # times by microbatch, of those known so far
    done: int = 0  # microbatches
    feeds: "_Queue | None" = None  # of a microbatch's next action
    feeds_rank: int = -1
    delay: float = 0.0  # of the message to `feeds_rank`


@attrs.define(eq=False)
class _Rank:
    """Rank state: queues, memory by stage, pending weight gradients, the time when it is free, and actions."""

    queues: list[_Queue]
    memory: list[float]
    limit: float
    pending: deque[_Queue] = attrs.field(factory=deque)
    free_at: float = 0.0
    done: list[int] = attrs.field(factory=list)  # 4 * stage + op


def build_list_schedule(task: SchedulingTask, policy: PriorityPolicy) -> Program:
    """Return the program if every rank follows the policy; all op costs must be above 0."""
    ranks = _simulate_ranks(task, policy)
    bounds = np.cumsum([0, *(len(rank.done) for rank in ranks)])
    codes = np.concatenate([np.array(rank.done, dtype=np.int64) for rank in ranks])
    microbatch = np.zeros_like(codes)
    # The n-th action of a stage and op belongs to microbatch n.
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


def compute_peak_activations(
    program: Program, activations: Sequence[float], pending: Sequence[float] | None = None
) -> list[float]:
    """
    Return peak activations by rank, given `activations` by stage.

    From input gradients until weight gradients, a stage keeps `pending`, which defaults to `activations`.
    """
    size, left = (
        np.array(sizes)[program.stage] for sizes in (activations, activations if pending is None else pending)
    )
    change = np.choose(program.op, [size, -size, left - size, -left])
    return [float(change[program.rows(rank)].cumsum().max(initial=0.0)) for rank in range(program.ranks)]


def compute_makespan(task: SchedulingTask, policy: PriorityPolicy) -> float:
    """Return the makespan of `build_list_schedule`'s program."""
    return max(rank.free_at for rank in _simulate_ranks(task, policy))


def _simulate_ranks(task: SchedulingTask, policy: PriorityPolicy) -> list[_Rank]:
    """Simulate the ranks and return their final states."""
    ranks = _create_ranks(task, policy)
    pace = policy.pace * task.busiest_rank_microbatch_time
    # Times that differ by rounding errors count as equal.
    tolerance = ROUNDING * task.busiest_rank_microbatch_time
    events = [(0.0, rank_index) for rank_index in range(len(ranks))]  # (time, rank) at which a rank may have work
    while events:
        now, rank_index = heapq.heappop(events)
        rank = ranks[rank_index]
        if now < rank.free_at:
            continue
        queue, next_ready = _find_most_urgent_queue(rank, now + tolerance, pace)
        if queue is not None:
            end = now + queue.cost
            _run_queue_head(rank, queue)
            if queue.feeds is not None:
                queue.feeds.ready.append(end + queue.delay)
                # A busy rank looks at its queues when it becomes free.
                if ranks[queue.feeds_rank].free_at <= end + queue.delay and queue.feeds_rank != rank_index:
                    heapq.heappush(events, (end + queue.delay, queue.feeds_rank))
        elif rank.pending and next_ready - now + tolerance >= policy.patience * rank.pending[0].weight_gradient_cost:
            end = now + rank.pending[0].weight_gradient_cost
            _run_oldest_weight_gradients(rank)
        else:
            # With nothing to wait for, only another rank's result wakes this one.
            if next_ready < NEVER:
                heapq.heappush(events, (next_ready, rank_index))
            continue
        rank.free_at = end
        heapq.heappush(events, (end, rank_index))
    return ranks


def _create_ranks(task: SchedulingTask, policy: PriorityPolicy) -> list[_Rank]:
    """Return all ranks with queues, each linked to the queue its results feed."""
    owners, costs = task.stage_to_rank, task.costs
    due_forward, due_input = policy.compute_due_times(len(owners))
    period = task.busiest_rank_microbatch_time
    forwards, input_gradients = [], []  # queues by stage
    local: list[list[int]] = [[] for _ in range(task.ranks)]
    for stage, owner in enumerate(owners):
        local[owner].append(stage)
    for stage, owner in enumerate(owners):
        position = local[owner].index(stage)
        size = task.activations[stage]
        limit, sum_limits = _compute_activation_limits(task, policy, local[owner], position)
        forward, back, weights = (costs.get_duration(op, stage) for op in "FIW")
        new_queue = partial(
            _Queue,
            stage=stage,
            position=position,
            weight_gradient_cost=weights,
            size=size,
            growth=task.pending[stage] - size,
            limit=limit,
            sum_limits=sum_limits,
        )
        forwards.append(new_queue(op=FORWARD, cost=forward, due=due_forward[stage] * period))
        input_gradients.append(new_queue(op=BACKWARD_INPUT, cost=back, due=due_input[stage] * period))
    # A microbatch's actions feed one another: forward passes from the first stage on, then input gradients back to it.
    for queue, successor in pairwise([*forwards, *reversed(input_gradients)]):
        queue.feeds, queue.feeds_rank = successor, owners[successor.stage]
        queue.delay = costs.comm if owners[queue.stage] != owners[successor.stage] else 0.0
    forwards[0].ready = [0.0] * task.microbatches  # no action precedes the first stage's
    rank_limit = task.limit * (1 + ROUNDING)
    queues = list(zip(forwards, input_gradients, strict=True))
    return [_Rank([q for stage in own for q in queues[stage]], [0.0] * len(own), rank_limit) for own in local]


def _compute_activation_limits(
    task: SchedulingTask, policy: PriorityPolicy, own_stages: list[int], position: int
) -> tuple[float, list[float]]:
    """
    Return the limits on activations for stage `own_stages[position]`: its own, and those on the sums over the rank's
    stages up to this one and to every later one.
    """
    sizes = [task.activations[stage] for stage in own_stages]
    # Input gradients need room to grow: otherwise forward passes would wait for them, and they for memory.
    limit = task.limit * (1 + ROUNDING) - task.compute_max_input_grad_memory(task.stage_to_rank[own_stages[0]])
    spared, last = policy.spared
    spared += (last - spared) * task.stage_to_rank[own_stages[position]] / task.ranks
    stage_limit = max(sizes[position], limit * (1 - spared)) if position < len(own_stages) - 1 else limit
    # Without memory for the later stages, activations of earlier ones would never be freed.
    return stage_limit, [limit - sum(sizes[later:]) for later in range(position + 1, len(own_stages) + 1)]


def _find_most_urgent_queue(rank: _Rank, now: float, pace: float) -> tuple[_Queue | None, float]:
    """Return the queue with the most urgent ready head, and when the next fitting head will be ready."""
    urgent, earliest_due, next_ready = None, NEVER, NEVER
    for queue in rank.queues:
        done = queue.done
        if done == len(queue.ready) or not (
            _forward_fits_memory_limits(rank.memory, queue)
            if queue.op == FORWARD
            else queue.growth <= 0.0 or sum(rank.memory) + queue.growth <= rank.limit
        ):
            continue
        if (ready := queue.ready[done]) > now:
            if ready < next_ready:
                next_ready = ready
        elif (due := queue.due + done * pace) < earliest_due:
            urgent, earliest_due = queue, due
    return urgent, next_ready


def _forward_fits_memory_limits(memory: list[float], queue: _Queue) -> bool:
    """Return whether the next forward pass in a queue fits the memory limits."""
    size, position = queue.size, queue.position
    if memory[position] + size > queue.limit:
        return False
    total = sum(memory[:position]) + size
    for stage, limit in enumerate(queue.sum_limits, position):
        total += memory[stage]
        if total > limit:
            return False
    return True


def _run_queue_head(rank: _Rank, queue: _Queue) -> None:
    """Run a queue's head on its rank: record the action, and update the rank's memory."""
    rank.done.append(4 * queue.stage + queue.op)
    queue.done += 1
    if queue.op == FORWARD:
        rank.memory[queue.position] += queue.size
    else:
        rank.memory[queue.position] += queue.growth
        rank.pending.append(queue)


def _run_oldest_weight_gradients(rank: _Rank) -> None:
    """Run a rank's oldest pending weight gradients: record the action, and free their memory."""
    queue = rank.pending.popleft()
    rank.memory[queue.position] -= queue.size + queue.growth
    rank.done.append(4 * queue.stage + BACKWARD_WEIGHT)
