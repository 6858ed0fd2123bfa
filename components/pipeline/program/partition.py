"""
Partition of a model's slices into stages, for the shortest program within memory.

A stage has one or more consecutive slices. A program takes as long as the longest path through its actions, so its
makespan is a convex function of the stages' costs: a partition that moving a single slice does not improve is usually
the best one. If there are only few partitions, all are tried.
"""

import math
import random
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations, pairwise

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.components.pipeline.program.builders import index_stages_on_ranks
from drawloom.components.pipeline.program.list_scheduling import ROUNDING, SchedulingTask
from drawloom.components.pipeline.program.recomputation import (
    ONE_OF,
    LiveMicrobatches,
    RecomputeCosts,
    RecomputeOptions,
    list_stage_choices,
)
from drawloom.components.pipeline.program.timing import (
    Costs,
    CostTable,
    Floats,
    compute_timing,
    index_produced_and_consumed_results,
)
from drawloom.ports import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, OPS, Program, Recompute

StageSizes = tuple[int, ...]
"""Numbers of slices by stage."""

MAX_EXHAUSTIVE = 500
"""Number of partitions up to which all are tried."""

MAX_TIMED_ACTIONS = 3_000_000
"""Limit of actions times partitions that are timed for one program, which takes half a second."""


@attrs.frozen(eq=False)
class BatchedTiming:
    """Timing for one program under many costs at once, as fast as a few separate timings."""

    program: Program
    comm: float

    @cached_property
    def _wave(self) -> NDArray[np.int64]:
        """The waves of actions, which do not depend on costs."""
        return compute_timing(self.program, Costs()).wave

    def compute_makespans(self, lengths: Floats) -> Floats:
        """Return the makespans (costs,) for `lengths` (costs, stages, ops), ordered like OPS."""
        order = np.argsort(self._wave, kind="stable")
        produces, consumes, delay = (
            cells[order] for cells in index_produced_and_consumed_results(self.program, Costs(comm=self.comm))
        )
        rank = self.program.rank_by_action[order]
        kind = self.program.stage[order] * len(OPS) + self.program.op[order]
        table = np.ascontiguousarray(lengths.reshape(len(lengths), -1).T)
        end_of = np.zeros((int(produces.max(initial=0)) + 1, len(lengths)))
        free_at = np.zeros((self.program.ranks, len(lengths)))
        for first, last in pairwise(np.cumsum([0, *np.bincount(self._wave)]).tolist()):
            rows = slice(first, last)
            ready = end_of[consumes[rows]] + delay[rows, None]
            end = np.maximum(free_at[rank[rows]], ready) + table[kind[rows]]
            free_at[rank[rows]] = end_of[produces[rows]] = end
        makespans: Floats = free_at.max(axis=0)
        return makespans


@attrs.frozen(eq=False)
class ModelSlices:
    """
    A microbatch's costs by model slice: `lengths` (slices, ops), ordered like OPS.

    `activations` (slices,) are alive from the forward pass until input gradients, and `pending` (slices,) from then on
    until weight gradients; `pending` defaults to `activations`. `per_stage` (ops,) are additional costs of every stage,
    and a message takes `comm`. `recomputed` are the stages' possible policies; a slice counts as `parts` (slices,)
    blocks.
    """

    lengths: Floats
    activations: Floats
    per_stage: Floats
    comm: float
    pending: Floats = attrs.field(default=attrs.Factory(lambda self: self.activations, takes_self=True))
    recomputed: Sequence[RecomputeCosts] = ()
    parts: Floats = attrs.field(default=attrs.Factory(lambda self: np.ones_like(self.activations), takes_self=True))

    def __len__(self) -> int:
        return len(self.lengths)

    def compute_cost_table(self, sizes: StageSizes) -> CostTable:
        """Return the stages' costs without recomputation."""
        forward, whole, inputs, weights = self.lengths.mean(0).tolist()
        return CostTable(forward, inputs, weights, whole, self.comm, lengths=self.sum_costs_by_stage([sizes])[0])

    def iterate_tasks_by_recompute_choice(
        self, stage_to_rank: tuple[int, ...], microbatches: int, limit: float, sizes: StageSizes
    ) -> Iterator[SchedulingTask]:
        """Yield a partition's scheduling tasks by choice of recompute policies; the first recomputes nothing."""
        table = self.compute_cost_table(sizes)
        options, stages = self.list_recompute_options([sizes]), range(len(sizes))
        local = index_stages_on_ranks(stage_to_rank)
        for way in list_stage_choices(range(len(options.policies)), 1 + max(local)):
            chosen = [way[position] for position in local], 0, stages
            costs = attrs.evolve(
                table, lengths=_add_recompute_seconds_to_backward(table.lengths, options.again[chosen])
            )
            activations, pending = (tuple(sizes.tolist()) for sizes in (options.kept[chosen], options.pending[0]))
            yield SchedulingTask(stage_to_rank, microbatches, costs, activations, limit, pending)

    def sum_costs_by_stage(self, partitions: Sequence[StageSizes]) -> Floats:
        """Return costs (partitions, stages, ops) for partitions with equal stage counts."""
        return _sum_by_stage(self.lengths, partitions) + self.per_stage

    def sum_activations_by_stage(self, partitions: Sequence[StageSizes]) -> Floats:
        """Return a microbatch's activations (partitions, stages) for partitions with equal stage counts."""
        return _sum_by_stage(self.activations, partitions)

    def merge_into_stages(self, sizes: StageSizes) -> "ModelSlices":
        """Return the costs with every stage in a partition merged into one slice."""
        recomputed = [
            attrs.evolve(
                policy, again=_sum_by_stage(policy.again, [sizes])[0], kept=_sum_by_stage(policy.kept, [sizes])[0]
            )
            for policy in self.recomputed
        ]
        activations, pending, parts = (
            _sum_by_stage(values, [sizes])[0] for values in (self.activations, self.pending, self.parts)
        )
        return ModelSlices(
            lengths=self.sum_costs_by_stage([sizes])[0],
            activations=activations,
            per_stage=np.zeros_like(self.per_stage),
            comm=self.comm,
            pending=pending,
            recomputed=recomputed,
            parts=parts,
        )

    def list_recompute_options(self, partitions: Sequence[StageSizes]) -> RecomputeOptions:
        """Return the stages' recompute options in these partitions."""
        activations, parts = self.sum_activations_by_stage(partitions), _sum_by_stage(self.parts, partitions)
        policies: list[Recompute] = ["none"]
        again, kept = [np.zeros_like(activations)], [activations]
        for recomputed in self.recomputed:
            all_again, all_kept = (
                _sum_by_stage(recomputed.again, partitions),
                _sum_by_stage(recomputed.kept, partitions),
            )
            for one_of in ONE_OF if recomputed.policy == "blocks" else (1,):
                if one_of <= parts.max():
                    share = np.ceil(parts / one_of) / parts
                    policies.append(recomputed.policy if one_of == 1 else one_of)
                    again.append(share * all_again)
                    kept.append(activations + share * (all_kept - activations))
        return RecomputeOptions(
            tuple(policies), np.stack(again), np.stack(kept), _sum_by_stage(self.pending, partitions)
        )

    def list_starting_partitions(self, stage_to_rank: Sequence[int]) -> list[StageSizes]:
        """Return starting points for a search: equal sizes, equal costs by rank, and equal activations by rank."""
        every_op = self.lengths[:, [FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT]].sum(1)
        balanced = [_choose_sizes_balancing_ranks(values, stage_to_rank) for values in (every_op, self.activations)]
        return [partition_evenly(len(self), len(stage_to_rank)), *balanced]


@attrs.frozen(eq=False)
class FittedProgram:
    """
    Program with its stage sizes in slices, and its makespan, infinite if memory does not suffice.

    Its stages use the fastest fitting recompute policies. `microbatch_peak_memory` is one microbatch's memory on the
    rank that needs most.
    """

    program: Program
    sizes: StageSizes
    makespan: float
    microbatch_peak_memory: float


@attrs.frozen(eq=False)
class PartitionSearch:
    """Search for a partition of a model into a program's stages, with activations up to `limit` on a rank."""

    program: Program
    slices: ModelSlices
    limit: float

    @cached_property
    def _timings(self) -> BatchedTiming:
        return BatchedTiming(self.program, self.slices.comm)

    @cached_property
    def _live(self) -> list[LiveMicrobatches]:
        return [LiveMicrobatches.count_at_possible_peaks(self.program, rank) for rank in range(self.program.ranks)]

    def search_best_partition(self, starts: Sequence[StageSizes] = ()) -> FittedProgram:
        """Search for the partition with the shortest makespan, from `starts` or from the usual starting points."""
        slices, stages, actions = len(self.slices), self.program.stages, len(self.program.op)
        starts = starts or self.slices.list_starting_partitions(self.program.stage_to_rank)
        if math.comb(slices - 1, stages - 1) <= min(MAX_EXHAUSTIVE, MAX_TIMED_ACTIONS // actions):
            return self._select_fastest_partition([*starts, *_iterate_all_partitions(slices, stages)])
        best, room, chance = self._select_fastest_partition(starts), MAX_TIMED_ACTIONS // actions, random.Random(0)
        while moves := _list_partitions_moving_one_slice(best.sizes):
            moves = chance.sample(moves, room) if len(moves) > room else moves
            room -= len(moves)
            if not moves or (fitted := self._select_fastest_partition(moves)).makespan >= best.makespan * (1 - 1e-9):
                break
            best = fitted
        return best

    def _select_fastest_partition(self, partitions: Sequence[StageSizes]) -> FittedProgram:
        """Return the partition with the shortest makespan; without one that fits, the one with the least memory."""
        options = self.slices.list_recompute_options(partitions)
        chosen, fits = options.choose_least_recomputation(self._live, self.limit * (1 + ROUNDING))
        index = chosen, np.arange(len(partitions))[:, None], np.arange(self.program.stages)
        makespans = self._timings.compute_makespans(
            _add_recompute_seconds_to_backward(self.slices.sum_costs_by_stage(partitions), options.again[index])
        )
        makespans[~fits] = math.inf
        smallest = options.kept.min(0)
        growth = np.maximum(options.pending - smallest, 0.0)
        by_rank = [smallest[:, rank.stages].sum(1) + growth[:, rank.stages].max(1) for rank in self._live]
        peaks = np.max(by_rank, axis=0)
        if makespans.min() == math.inf:
            number = int(peaks.argmin())
        else:
            # Differences by rounding errors do not count; the first partition is the most even.
            number = int(np.flatnonzero(makespans <= makespans.min() * (1 + 1e-9))[0])
        policies = (
            tuple(options.policies[option] for option in chosen[number].tolist()) if self.slices.recomputed else ()
        )
        program = attrs.evolve(self.program, recompute=policies)
        return FittedProgram(program, partitions[number], float(makespans[number]), float(peaks[number]))


def partition_evenly(slices: int, stages: int) -> StageSizes:
    """Return stage sizes as equal as possible; the earlier stages have the remainder."""
    size, remainder = divmod(slices, stages)
    return (size + 1,) * remainder + (size,) * (stages - remainder)


def _choose_sizes_balancing_ranks(values: Floats, stage_to_rank: Sequence[int]) -> StageSizes:
    """Return stage sizes with similar sums of `values` (slices,) by rank; inner slices count with their mean."""
    mean = float(values[1:-1].mean() if len(values) > 2 else values.mean())
    stages, sizes, ranks = [mean] * len(stage_to_rank), [1] * len(stage_to_rank), [0.0] * (max(stage_to_rank) + 1)
    stages[0], stages[-1] = float(values[0]), float(values[-1])
    for value, rank in zip(stages, stage_to_rank, strict=True):
        ranks[rank] += value
    # Every further slice goes to the rank with the smallest sum, and there to the smallest stage, the first of equals.
    for _ in range(len(values) - len(sizes)):
        stage = min(range(len(sizes)), key=lambda number: (ranks[stage_to_rank[number]], stages[number]))
        sizes[stage] += 1
        stages[stage] += mean
        ranks[stage_to_rank[stage]] += mean
    return tuple(sizes)


def _sum_by_stage(values: Floats, partitions: Sequence[StageSizes]) -> Floats:
    """Return sums (partitions, stages, ...) of values (slices, ...) over every stage's slices."""
    bounds = np.cumsum(np.array(partitions), axis=1)
    whole = np.concatenate([np.zeros_like(values[:1]), values.cumsum(0)])
    sums: Floats = whole[bounds] - whole[bounds - np.array(partitions)]
    return sums


def _iterate_all_partitions(slices: int, stages: int) -> Iterator[StageSizes]:
    """Yield the sizes in all partitions."""
    for cuts in combinations(range(1, slices), stages - 1):
        yield tuple(last - first for first, last in pairwise((0, *cuts, slices)))


def _list_partitions_moving_one_slice(sizes: StageSizes) -> list[StageSizes]:
    """Return all partitions with one slice moved from one stage to another."""
    neighbours = []
    for source in range(len(sizes)):
        for target in range(len(sizes)):
            if source != target and sizes[source] > 1:
                moved = list(sizes)
                moved[source] -= 1
                moved[target] += 1
                neighbours.append(tuple(moved))
    return neighbours


def _add_recompute_seconds_to_backward(lengths: Floats, recompute_seconds: Floats) -> Floats:
    """Add `recompute_seconds` (..., stages) to the backward durations in `lengths` (..., stages, ops)."""
    lengths = lengths.copy()
    lengths[..., [BACKWARD, BACKWARD_INPUT]] += recompute_seconds[..., None]
    return lengths
