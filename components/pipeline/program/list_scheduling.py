"""
Greedy list scheduling: a free rank runs the most urgent action that is ready and that its memory limit allows.

A rank has its forwards and input gradients in queues, in order of urgency, and runs the head of the first queue whose
head is ready. Weight gradients, on which no action depends, fill the bubbles: if no head is ready, or memory is full,
the rank runs the oldest pending one, unless a head will be ready within half of its duration.

All ranks are simulated together. An action that starts now ends after the duration of the shortest action at the
earliest, so ranks that become free within that time can already decide; each iteration decides for all of them.
"""

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.components.pipeline.program.builders import F0, F1, I0, I1, build_program, vee
from drawloom.components.pipeline.program.timing import Costs, dependencies
from drawloom.components.ports.program import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Program

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def list_schedule(ranks: int, microbatches: int, limit: int, costs: Costs) -> Program:
    """
    A program of two stages a rank on a V, in which a rank holds at most `limit` (at least 2) stage-microbatches.

    In order of urgency: forwards of a rank's second stage, then of its first, then input gradients of the first, then
    of the second. The first stage may use all but one of the limit on the first rank, falling to half on the last, as
    the lifetimes of its activations do; with the whole limit it would leave no memory for the second stage.
    """
    queues = [op_code for kind in (F1, F0, I0, I1) for op_code in [kind] * microbatches]
    share = limit - 1 - np.ceil((limit / 2 - 1) * np.arange(ranks) / ranks).astype(np.int64)
    return _fill(build_program([queues] * ranks, vee(ranks), microbatches), 4, Memory(limit, share, strict=True), costs)


def fill_bubbles(program: Program, limit: int, costs: Costs) -> Program:
    """
    A program's forwards and input gradients in their order, with weight gradients in the bubbles.

    A rank holds at most `limit` stage-microbatches, if the order allows it.
    """
    inputs = np.where(program.op == BACKWARD, BACKWARD_INPUT, program.op)
    urgent = attrs.evolve(program, op=inputs).select(inputs != BACKWARD_WEIGHT)
    return _fill(urgent, 1, Memory(limit, np.full(program.ranks, limit), strict=False), costs)


@attrs.frozen
class Memory:
    """
    The stage-microbatches that a rank may hold, each from its forward to its weight gradient.

    `limit` in all, and `first` of each rank's first stage. Unless it is `strict`, a rank without pending weight
    gradients may exceed it, for nothing else could free memory.
    """

    limit: int
    first: Ints
    strict: bool


def _fill(program: Program, queues: int, memory: Memory, costs: Costs) -> Program:
    """
    Forwards and input gradients in the order of their queues, with weight gradients inserted.

    Each rank's program is its queues, of equal length, concatenated. The costs of ops must be above 0.
    """
    scheduler = _ListScheduler(program, queues, memory, costs, _ActionTable.of(program, costs))
    while (active := scheduler.has_work()).any():
        scheduler.advance(active)
    return scheduler.result()


@attrs.frozen(eq=False)
class _ActionTable:
    """Properties of each action. A last row is an action that is never ready, the head of an empty queue."""

    consumes: Ints
    produces: Ints
    delay: Floats
    cost: Floats
    forward: Bools
    first: Bools

    @classmethod
    def of(cls, program: Program, costs: Costs) -> "_ActionTable":
        produces, consumes, delay = dependencies(program, costs)
        never = produces.max(initial=0) + 1
        return cls(
            consumes=np.append(consumes, never),
            produces=np.append(produces, never),
            delay=np.append(delay, 0.0),
            cost=np.append(costs.of(program.op), 0.0),
            forward=np.append(program.op == FORWARD, False),
            first=np.append(program.stage < program.ranks, False),
        )


@attrs.define(eq=False)
class _ListScheduler:
    """The state of all ranks during list scheduling."""

    program: Program
    queues: int
    memory: Memory
    costs: Costs
    actions: _ActionTable
    # by queue and rank: the action at its head, and its end
    head: Ints = attrs.field(init=False)
    tail: Ints = attrs.field(init=False)
    # by cell (see timing.dependencies): when its activation or gradient is ready
    ready_time: Floats = attrs.field(init=False)
    # by rank: when it is free, the stage-microbatches that it holds, and its weight gradients, in all and done
    time: Floats = attrs.field(init=False)
    held: Ints = attrs.field(init=False)
    held_first: Ints = attrs.field(init=False)
    pending_added: Ints = attrs.field(init=False)
    pending_done: Ints = attrs.field(init=False)
    # by rank, in order: input gradients whose weight gradients are pending; and all actions done (weight gradients ~)
    pending: Ints = attrs.field(init=False)
    done: Ints = attrs.field(init=False)
    count: Ints = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        bounds, ranks = self.program.bounds, self.program.ranks
        edges = bounds[:-1] + np.outer(np.arange(self.queues + 1), np.diff(bounds) // self.queues)
        longest = int(np.diff(bounds).max())
        self.head, self.tail = edges[:-1].copy(), edges[1:]
        self.ready_time = np.full(self.actions.produces.max() + 1, np.inf)
        self.ready_time[0] = 0.0
        self.time = np.zeros(ranks)
        self.held, self.held_first, self.pending_added, self.pending_done, self.count = np.zeros(
            (5, ranks), dtype=np.int64
        )
        self.pending = np.zeros((ranks, longest), dtype=np.int64)
        self.done = np.zeros((ranks, 2 * longest), dtype=np.int64)

    def has_work(self) -> Bools:
        """For each rank, whether it has actions left."""
        return (self.head < self.tail).any(axis=0) | (self.pending_done < self.pending_added)

    def advance(self, active: Bools) -> None:
        """Decide the next action of every rank that becomes free within the duration of the shortest op."""
        # The last row of the action table, never ready, is the head of an empty queue.
        heads = np.where(self.head < self.tail, self.head, len(self.actions.consumes) - 1)
        ready_at = self.ready_time[self.actions.consumes[heads]] + self.actions.delay[heads]
        ready_at[self._over_limit(heads)] = np.inf
        soonest = ready_at.min(axis=0)
        shortest = min(self.costs.forward, self.costs.backward_input, self.costs.backward_weight)
        # Nothing that starts now can end before the horizon, so decisions up to it need no knowledge of later ones.
        horizon = self.time[active].min() + shortest
        deciding = active & (self.time < horizon)
        ready = ready_at <= self.time
        computing = deciding & ready.any(axis=0)
        does_weights = (
            deciding
            & ~computing
            & (self.pending_done < self.pending_added)
            & (soonest - self.time >= self.costs.backward_weight / 2)
        )
        waiting = deciding & ~computing & ~does_weights
        self.time[waiting] = np.minimum(soonest[waiting], horizon)
        self._do_op(np.flatnonzero(computing), heads, ready)
        self._do_weight_grads(np.flatnonzero(does_weights))

    def _over_limit(self, heads: Ints) -> Bools:
        """The heads of queues that would exceed the memory limit."""
        full = self.held >= self.memory.limit
        first_full = self.actions.first[heads] & (self.held_first >= self.memory.first)
        excused = (self.pending_done == self.pending_added) & (not self.memory.strict)
        over_limit: Bools = self.actions.forward[heads] & (full | first_full) & ~excused
        return over_limit

    def _do_op(self, ranks: Ints, heads: Ints, ready: Bools) -> None:
        queue = ready[:, ranks].argmax(axis=0)
        action = heads[queue, ranks]
        self.time[ranks] += self.actions.cost[action]
        self.ready_time[self.actions.produces[action]] = self.time[ranks]
        self.head[queue, ranks] += 1
        self.held[ranks] += self.actions.forward[action]
        self.held_first[ranks] += self.actions.forward[action] & self.actions.first[action]
        self._record(ranks, action)
        adds_pending = ~self.actions.forward[action]
        adding = ranks[adds_pending]
        self.pending[adding, self.pending_added[adding]] = action[adds_pending]
        self.pending_added[adding] += 1

    def _do_weight_grads(self, ranks: Ints) -> None:
        action = self.pending[ranks, self.pending_done[ranks]]
        self.pending_done[ranks] += 1
        self.time[ranks] += self.costs.backward_weight
        self.held[ranks] -= 1
        self.held_first[ranks] -= self.actions.first[action]
        self._record(ranks, ~action)

    def _record(self, ranks: Ints, action: Ints) -> None:
        self.done[ranks, self.count[ranks]] = action
        self.count[ranks] += 1

    def result(self) -> Program:
        """The program of the actions done."""
        done = np.concatenate([line[:count] for line, count in zip(self.done, self.count, strict=True)])
        action = np.where(done < 0, ~done, done)
        work = np.where(done < 0, BACKWARD_WEIGHT, self.program.op[action])
        return attrs.evolve(
            self.program,
            bounds=np.append(0, np.cumsum(self.count)),
            stage=self.program.stage[action],
            op=work,
            microbatch=self.program.microbatch[action],
            overlaps_previous=np.zeros(len(work), dtype=bool),
        )
