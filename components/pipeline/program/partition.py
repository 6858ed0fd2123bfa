"""
How slices of a model are joined to stages, so that a program takes least time in the memory that there is.

Stages have consecutive slices, at least one each. A program takes as long as the longest path through its actions, and
so its makespan is a convex function of the costs of stages: a partition that no single slice that moves makes better is
mostly the best of all. Where there are few partitions, all are tried.
"""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.components.pipeline.program.list_scheduling import ROUNDING, Task
from drawloom.components.pipeline.program.recomputation import ONE_OF, Held, Options, Recomputed, ways
from drawloom.components.pipeline.program.timing import CostTable, ManyTimings
from drawloom.components.ports.program import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Program
from drawloom.components.ports.stages import Recompute

Sizes = tuple[int, ...]
"""How many slices each stage has."""

FEW = 500
"""A model with at most this many partitions has all of them tried."""

MOST_WORK = 3_000_000
"""The most actions that are timed for one program, times partitions: half a second."""


@attrs.frozen(eq=False)
class Slices:
    """
    What a microbatch costs in each slice of a model, `lengths` (slices, ops) in the order of OPS, and what it holds.

    `activations` (slices,) are held from a forward until input gradients, and `pending` (slices,) from these until
    weight gradients, as much if it is left out. `per_stage` (ops,) is what every stage costs besides, and a message
    takes `comm`. Stages may be `recomputed` in these ways; each slice counts as `parts` (slices,) blocks there.
    """

    lengths: NDArray[np.float64]
    activations: NDArray[np.float64]
    per_stage: NDArray[np.float64]
    comm: float
    pending: NDArray[np.float64] = attrs.field(default=attrs.Factory(lambda self: self.activations, takes_self=True))
    recomputed: Sequence[Recomputed] = ()
    parts: NDArray[np.float64] = attrs.field(
        default=attrs.Factory(lambda self: np.ones_like(self.activations), takes_self=True)
    )

    def __len__(self) -> int:
        return len(self.lengths)

    def table(self, sizes: Sizes) -> CostTable:
        """The costs of stages that recompute nothing."""
        forward, whole, inputs, weights = self.lengths.mean(0).tolist()
        return CostTable(forward, inputs, weights, whole, self.comm, lengths=self.costs_of([sizes])[0])

    def tasks(self, stage_to_rank: tuple[int, ...], microbatches: int, limit: float, sizes: Sizes) -> Iterator[Task]:
        """Those of a partition, for every way to recompute that is alike on all ranks, the first of them not at all."""
        table = self.table(sizes)
        options, stages = self.options([sizes]), range(len(sizes))
        local = [stage_to_rank[:stage].count(rank) for stage, rank in enumerate(stage_to_rank)]
        for way in ways(len(options.policies), 1 + max(local)):
            chosen = way[local], 0, stages
            costs = attrs.evolve(table, lengths=_longer(table.lengths, options.again[chosen]))
            held, pending = (tuple(each.tolist()) for each in (options.kept[chosen], options.pending[0]))
            yield Task(stage_to_rank, microbatches, costs, held, limit, pending)

    def costs_of(self, partitions: Sequence[Sizes]) -> NDArray[np.float64]:
        """The costs (partitions, stages, ops) of the stages of partitions of as many stages."""
        return _summed(self.lengths, partitions) + self.per_stage

    def held_by(self, partitions: Sequence[Sizes]) -> NDArray[np.float64]:
        """The activations (partitions, stages) of a microbatch in the stages of partitions of as many stages."""
        return _summed(self.activations, partitions)

    def joined(self, sizes: Sizes) -> "Slices":
        """The same model in slices that are the stages of a partition."""
        each = [
            attrs.evolve(each, again=_summed(each.again, [sizes])[0], kept=_summed(each.kept, [sizes])[0])
            for each in self.recomputed
        ]
        held, pending, parts = (_summed(each, [sizes])[0] for each in (self.activations, self.pending, self.parts))
        alone = np.zeros_like(self.per_stage)
        return Slices(
            lengths=self.costs_of([sizes])[0],
            activations=held,
            per_stage=alone,
            comm=self.comm,
            pending=pending,
            recomputed=each,
            parts=parts,
        )

    def options(self, partitions: Sequence[Sizes]) -> Options:
        """What the stages of partitions may recompute."""
        held, parts = self.held_by(partitions), _summed(self.parts, partitions)
        policies: list[Recompute] = ["none"]
        again, kept = [np.zeros_like(held)], [held]
        for each in self.recomputed:
            more, left = _summed(each.again, partitions), _summed(each.kept, partitions)
            for one_of in ONE_OF if each.policy == "blocks" else (1,):
                if one_of <= parts.max():
                    share = np.ceil(parts / one_of) / parts
                    policies.append(each.policy if one_of == 1 else one_of)
                    again.append(share * more)
                    kept.append(held + share * (left - held))
        return Options(tuple(policies), np.stack(again), np.stack(kept), _summed(self.pending, partitions))

    def starts(self, stage_to_rank: Sequence[int]) -> list[Sizes]:
        """Partitions that a search starts from: as even ones, ranks that cost alike, and that hold alike."""
        every_op = self.lengths[:, [FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT]].sum(1)
        alike = [_alike(values, stage_to_rank) for values in (every_op, self.activations)]
        return [even(len(self), len(stage_to_rank)), *alike]


@attrs.frozen(eq=False)
class Fitted:
    """
    A program, how many slices each of its stages has, and its makespan, infinite if it does not fit in memory.

    Its stages recompute what makes it fit in the least time. `least` is the most that a rank holds of one microbatch.
    """

    program: Program
    sizes: Sizes
    makespan: float
    least: float


@attrs.frozen(eq=False)
class Fit:
    """A program that is timed with many partitions of a model, whose ranks hold at most `limit` of activations."""

    program: Program
    slices: Slices
    limit: float
    _timings: ManyTimings = attrs.field(init=False)
    _held: list[Held] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_timings", ManyTimings(self.program, self.slices.comm))
        object.__setattr__(self, "_held", [Held.of(self.program, rank) for rank in range(self.program.ranks)])

    def best(self, starts: Sequence[Sizes] = ()) -> Fitted:
        """The partition of shortest makespan that is found, from some or from usual ones on."""
        slices, stages, actions = len(self.slices), self.program.stages, len(self.program.op)
        starts = starts or self.slices.starts(self.program.stage_to_rank)
        if math.comb(slices - 1, stages - 1) <= min(FEW, MOST_WORK // actions):
            return self._shortest([*starts, *_every(slices, stages)])
        best, room, chance = self._shortest(starts), MOST_WORK // actions, random.Random(0)
        while moves := _moved(best.sizes):
            moves = chance.sample(moves, room) if len(moves) > room else moves
            room -= len(moves)
            if not moves or (found := self._shortest(moves)).makespan >= best.makespan * (1 - 1e-9):
                break
            best = found
        return best

    def _shortest(self, partitions: Sequence[Sizes]) -> Fitted:
        options = self.slices.options(partitions)
        chosen, fits = options.least(self._held, self.limit * (1 + ROUNDING))
        place = chosen, np.arange(len(partitions))[:, None], np.arange(self.program.stages)
        found = self._timings.makespans(_longer(self.slices.costs_of(partitions), options.again[place]))
        found[~fits] = math.inf
        smallest = options.kept.min(0)
        growth = np.maximum(options.pending - smallest, 0.0)
        each_holds = [smallest[:, each.stages].sum(1) + growth[:, each.stages].max(1) for each in self._held]
        least = np.max(each_holds, axis=0)
        if found.min() == math.inf:
            number = int(least.argmin())
        else:
            # A difference by rounding errors does not count: the first one is the most even.
            number = int(np.flatnonzero(found <= found.min() * (1 + 1e-9))[0])
        policies = tuple(options.policies[each] for each in chosen[number].tolist()) if self.slices.recomputed else ()
        program = attrs.evolve(self.program, recompute=policies)
        return Fitted(program, partitions[number], float(found[number]), float(least[number]))


def even(slices: int, stages: int) -> Sizes:
    """Stages of as many slices each; a remainder goes to the earlier ones."""
    each, more = divmod(slices, stages)
    return (each + 1,) * more + (each,) * (stages - more)


def _alike(values: NDArray[np.float64], stage_to_rank: Sequence[int]) -> Sizes:
    """Stages whose ranks have about the same sum of the values (slices,), of which inner ones count as their mean."""
    mean = float(values[1:-1].mean() if len(values) > 2 else values.mean())
    stages, sizes, ranks = [mean] * len(stage_to_rank), [1] * len(stage_to_rank), [0.0] * (max(stage_to_rank) + 1)
    stages[0], stages[-1] = float(values[0]), float(values[-1])
    for value, rank in zip(stages, stage_to_rank, strict=True):
        ranks[rank] += value
    # Each further slice goes to the rank that has least so far, to its stage that has least, to the first of several.
    for _ in range(len(values) - len(sizes)):
        stage = min(range(len(sizes)), key=lambda each: (ranks[stage_to_rank[each]], stages[each]))
        sizes[stage] += 1
        stages[stage] += mean
        ranks[stage_to_rank[stage]] += mean
    return tuple(sizes)


def _summed(values: NDArray[np.float64], partitions: Sequence[Sizes]) -> NDArray[np.float64]:
    """The sums (partitions, stages, ...) of what the slices (slices, ...) of each stage have."""
    bounds = np.cumsum(np.array(partitions), axis=1)
    whole = np.concatenate([np.zeros_like(values[:1]), values.cumsum(0)])
    found: NDArray[np.float64] = whole[bounds] - whole[bounds - np.array(partitions)]
    return found


def _every(slices: int, stages: int) -> Iterator[Sizes]:
    """All partitions."""
    for cuts in combinations(range(1, slices), stages - 1):
        yield tuple(last - first for first, last in pairwise((0, *cuts, slices)))


def _moved(sizes: Sizes) -> list[Sizes]:
    """All partitions in which one stage has a slice less, and another one more."""
    found = []
    for one in range(len(sizes)):
        for other in range(len(sizes)):
            if one != other and sizes[one] > 1:
                moved = list(sizes)
                moved[one] -= 1
                moved[other] += 1
                found.append(tuple(moved))
    return found


def _longer(lengths: NDArray[np.float64], again: NDArray[np.float64]) -> NDArray[np.float64]:
    """The costs (..., stages, ops) of stages whose backward passes take longer by `again` (..., stages)."""
    found = lengths.copy()
    found[..., [BACKWARD, BACKWARD_INPUT]] += again[..., None]
    return found
