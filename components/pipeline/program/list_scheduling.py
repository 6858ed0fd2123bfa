"""
Lines filled greedily: whenever a rank is free, it does the most urgent work that is ready and that its memory allows.

A rank has its forwards and input gradients in queues, the urgent ones first, and takes the head of the first queue that
it can. Weight gradients, which nobody waits for, go into the gaps: when nothing is ready, or memory is full, the rank
does the oldest that it owes, unless something will be ready before half of that is done.

All ranks are filled together, in time. What starts now ends after the shortest work has passed at the earliest, so that
ranks which are free within that time know all that they need to know; each round decides once for all of them.
"""

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.components.pipeline.program.builders import F0, F1, I0, I1, build_program, vee
from drawloom.components.pipeline.program.costs import Costs
from drawloom.components.pipeline.program.timing import dependencies
from drawloom.components.ports.program import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Program

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def list_schedule(ranks: int, microbatches: int, limit: int, costs: Costs) -> Program:
    """
    Two stages a rank on a V, in any order that holds `limit` stage-microbatches at most, two or more, on each rank.

    Urgent is what lets others go on: forwards of the second stage, then of the first, then input gradients of the
    first. The first stage's share of the memory falls from all but one on the first rank to half on the last, as the
    lives of its activations do; with all of it, it would block the way up.
    """
    queues = [letter for kind in (F1, F0, I0, I1) for letter in [kind] * microbatches]
    share = limit - 1 - np.ceil((limit / 2 - 1) * np.arange(ranks) / ranks).astype(np.int64)
    return _fill(build_program([queues] * ranks, vee(ranks), microbatches), 4, Memory(limit, share, firm=True), costs)


def fill_bubbles(program: Program, limit: int, costs: Costs) -> Program:
    """
    A program's forwards and backwards towards inputs in their order, with weight gradients where ranks would wait.

    A rank holds at most `limit` stage-microbatches, if the order allows that.
    """
    inputs = np.where(program.op == BACKWARD, BACKWARD_INPUT, program.op)
    urgent = attrs.evolve(program, op=inputs).select(inputs != BACKWARD_WEIGHT)
    return _fill(urgent, 1, Memory(limit, np.full(program.ranks, limit), firm=False), costs)


@attrs.frozen
class Memory:
    """
    How many stage-microbatches a rank may hold, each from its forward to its weight gradient: `limit` in all, and for
    each rank `first` of its first stage. If it is not `firm`, a rank that owes no weight gradient may exceed it.
    """

    limit: int
    first: Ints
    firm: bool


def _fill(program: Program, queues: int, memory: Memory, costs: Costs) -> Program:
    """
    Forwards and backwards towards inputs in the order of their queues, with weight gradients put in.

    Each rank's line is its queues, of equal length, behind one another. No work costs nothing.
    """
    filling = _Filling(program, queues, memory, costs, _Actions.of(program, costs))
    while (is_open := filling.open()).any():
        filling.go_on(is_open)
    return filling.filled()


@attrs.frozen(eq=False)
class _Actions:
    """What is known of each action. Behind them all stands one that is never ready, the head of an empty queue."""

    consumes: Ints
    produces: Ints
    delay: Floats
    length: Floats
    forward: Bools
    first: Bools

    @classmethod
    def of(cls, program: Program, costs: Costs) -> "_Actions":
        makes, needs, delay = dependencies(program, costs)
        never = makes.max(initial=0) + 1
        return cls(
            consumes=np.append(needs, never),
            produces=np.append(makes, never),
            delay=np.append(delay, 0.0),
            length=np.append(costs.of(program.op), 0.0),
            forward=np.append(program.op == FORWARD, False),
            first=np.append(program.stage < program.ranks, False),
        )


@attrs.define(eq=False)
class _Filling:
    """The world while it is filled."""

    program: Program
    queues: int
    memory: Memory
    costs: Costs
    actions: _Actions
    # by queue and rank: the action at its head, and where it ends
    head: Ints = attrs.field(init=False)
    tail: Ints = attrs.field(init=False)
    # by cell: when what is left there is ready
    ends: Floats = attrs.field(init=False)
    # by rank: when it is free, what it holds, and how many weight gradients it came to owe, and paid
    time: Floats = attrs.field(init=False)
    held: Ints = attrs.field(init=False)
    held_first: Ints = attrs.field(init=False)
    incurred: Ints = attrs.field(init=False)
    paid: Ints = attrs.field(init=False)
    # by rank, one behind the other: what came to be owed, and what was done (weight gradients inverted)
    debts: Ints = attrs.field(init=False)
    done: Ints = attrs.field(init=False)
    count: Ints = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        bounds, ranks = self.program.bounds, self.program.ranks
        edges = bounds[:-1] + np.outer(np.arange(self.queues + 1), np.diff(bounds) // self.queues)
        longest = int(np.diff(bounds).max())
        self.head, self.tail = edges[:-1].copy(), edges[1:]
        self.ends = np.full(self.actions.produces.max() + 1, np.inf)
        self.ends[0] = 0.0
        self.time = np.zeros(ranks)
        self.held, self.held_first, self.incurred, self.paid, self.count = np.zeros((5, ranks), dtype=np.int64)
        self.debts = np.zeros((ranks, longest), dtype=np.int64)
        self.done = np.zeros((ranks, 2 * longest), dtype=np.int64)

    def open(self) -> Bools:
        """Whether a rank has anything left to do."""
        return (self.head < self.tail).any(axis=0) | (self.paid < self.incurred)

    def go_on(self, is_open: Bools) -> None:
        """Decide for every rank that is free soon what it does next."""
        heads = np.where(self.head < self.tail, self.head, len(self.actions.consumes) - 1)
        ready_at = self.ends[self.actions.consumes[heads]] + self.actions.delay[heads]
        ready_at[self._too_much(heads)] = np.inf
        soonest = ready_at.min(axis=0)
        shortest = min(self.costs.forward, self.costs.backward_input, self.costs.backward_weight)
        horizon = self.time[is_open].min() + shortest
        turn = is_open & (self.time < horizon)
        ready = ready_at <= self.time
        works = turn & ready.any(axis=0)
        pays = turn & ~works & (self.paid < self.incurred) & (soonest - self.time >= self.costs.backward_weight / 2)
        waits = turn & ~works & ~pays
        self.time[waits] = np.minimum(soonest[waits], horizon)
        self._work(np.flatnonzero(works), heads, ready)
        self._pay(np.flatnonzero(pays))

    def _too_much(self, heads: Ints) -> Bools:
        """Which heads of queues memory has no room for."""
        full = self.held >= self.memory.limit
        first_full = self.actions.first[heads] & (self.held_first >= self.memory.first)
        excused = (self.paid == self.incurred) & (not self.memory.firm)
        too_much: Bools = self.actions.forward[heads] & (full | first_full) & ~excused
        return too_much

    def _work(self, ranks: Ints, heads: Ints, ready: Bools) -> None:
        queue = ready[:, ranks].argmax(axis=0)
        action = heads[queue, ranks]
        self.time[ranks] += self.actions.length[action]
        self.ends[self.actions.produces[action]] = self.time[ranks]
        self.head[queue, ranks] += 1
        self.held[ranks] += self.actions.forward[action]
        self.held_first[ranks] += self.actions.forward[action] & self.actions.first[action]
        self._note(ranks, action)
        owing = ~self.actions.forward[action]
        debtors = ranks[owing]
        self.debts[debtors, self.incurred[debtors]] = action[owing]
        self.incurred[debtors] += 1

    def _pay(self, ranks: Ints) -> None:
        action = self.debts[ranks, self.paid[ranks]]
        self.paid[ranks] += 1
        self.time[ranks] += self.costs.backward_weight
        self.held[ranks] -= 1
        self.held_first[ranks] -= self.actions.first[action]
        self._note(ranks, ~action)

    def _note(self, ranks: Ints, action: Ints) -> None:
        self.done[ranks, self.count[ranks]] = action
        self.count[ranks] += 1

    def filled(self) -> Program:
        """What was done."""
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
