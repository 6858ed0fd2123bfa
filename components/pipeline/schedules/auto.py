"""
Search for the fastest schedule for measured costs that fits in memory, and for its stages' layers.

Every published schedule is simulated with costs for the model's slices and for messages, and the model is partitioned
into stages for the shortest makespan (`pipeline/program/partition.py`). Then programs are searched within the same
memory (`pipeline/program/policy_search.py`), as Qi et al. do in "Zero Bubble Pipeline Parallelism", ICLR 2024, section
3, and in "Pipeline Parallelism with Controllable Memory", NeurIPS 2024. The result is the shortest program overall, so
it is never slower than a published schedule, and among equals the one with the fewest messages. `drawloom schedule` and
`drawloom explain RECIPE stages` name it. All ranks find the same program.

If memory is short, stages may recompute activations (activation checkpointing), on every rank as little as makes a
program fit (`pipeline/program/recomputation.py`): such a program can be faster than all programs that fit without. Or
stages' activations wait in host memory, where a published schedule keeps them long: on every rank the stages with the
fewest copied bytes that make room. PipeOffload (Wan et al. 2025, arXiv 2503.01328) offloads whole stages, too, and
copies behind the passes in between. Other ranks' memory does not change, so each rank chooses for itself; waits for the
link are simulated.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from itertools import compress
from typing import Any, Literal

import attrs
import numpy as np

from drawloom import UserError, above, at_least, between, component, internal, setting
from drawloom.components.pipeline.program.builders import assign_stages_in_loop, assign_stages_in_vee
from drawloom.components.pipeline.program.list_scheduling import ROUNDING, build_list_schedule
from drawloom.components.pipeline.program.lowering import find_consumer_ranks, pair_offloaded_forward_and_backward
from drawloom.components.pipeline.program.partition import (
    FittedProgram,
    ModelSlices,
    PartitionSearch,
    StageSizes,
    partition_evenly,
)
from drawloom.components.pipeline.program.policy_search import (
    STARTS,
    TRIALS,
    search_best_policy,
    select_promising_tasks,
)
from drawloom.components.pipeline.program.recomputation import Floats, RecomputeCosts, list_stage_choices
from drawloom.components.pipeline.schedules.dual_pipe_v import DualPipeV
from drawloom.components.pipeline.schedules.gpipe import GPipe
from drawloom.components.pipeline.schedules.interleaved_1f1b import Interleaved1F1B
from drawloom.components.pipeline.schedules.looped_bfs import LoopedBreadthFirst
from drawloom.components.pipeline.schedules.one_f_one_b import OneFOneB
from drawloom.components.pipeline.schedules.v_half import VHalf
from drawloom.components.pipeline.schedules.v_min import VMin
from drawloom.components.pipeline.schedules.zero_bubble_1p import ZeroBubble1P
from drawloom.components.pipeline.schedules.zero_bubble_h2 import ZeroBubbleH2
from drawloom.components.pipeline.schedules.zero_bubble_v import ZeroBubbleV
from drawloom.components.pipeline.simulation.simulator import simulate
from drawloom.graph.component import Bound, Check
from drawloom.ports import FORWARD, OPS, Action, Program, Schedule


def offload_until_fit(
    fitted: FittedProgram, slices: ModelSlices, copies: Sequence[float], limit: float
) -> FittedProgram:
    """
    Return a program with the stages offloaded that make it fit into `limit`; its makespan is infinite if none do.

    `copies` are the times to copy the slices' activations to host memory; recomputation is left out.
    """
    merged = attrs.evolve(slices.merge_into_stages(fitted.sizes), recomputed=())
    bounds = np.cumsum([0, *fitted.sizes])
    seconds = np.add.reduceat(np.asarray(copies, dtype=np.float64), bounds[:-1])
    offloaded = set[int]()
    for rank in range(fitted.program.ranks):
        actions = [fitted.program.action(row) for row in range(*fitted.program.bounds[rank : rank + 2])]
        stages = sorted({action.stage for action in actions}, reverse=True)
        choices = [frozenset(compress(stages, chosen)) for chosen in list_stage_choices((False, True), len(stages))]
        fitting = (
            choice
            for choice in sorted(choices, key=lambda choice: float(seconds[[*choice]].sum()))
            if _compute_peak(actions, choice, merged.activations, merged.pending) <= limit * (1 + ROUNDING)
        )
        if (chosen := next(fitting, None)) is None:
            return attrs.evolve(fitted, makespan=math.inf)
        offloaded |= chosen
    program = attrs.evolve(fitted.program, recompute=(), offloaded=frozenset(offloaded))
    table = attrs.evolve(slices.compute_cost_table(fitted.sizes), offload_by_stage=seconds)
    return attrs.evolve(fitted, program=program, makespan=simulate(program, table).makespan)


def _compute_peak(actions: Sequence[Action], offloaded: Set[int], activations: Floats, pending: Floats) -> float:
    """Return a rank's peak activations on the device, by stages' activations and pending weight gradients."""
    moves: dict[int, float] = defaultdict(float)
    for start, end in pair_offloaded_forward_and_backward(actions, offloaded):
        moves[start + 2] -= activations[actions[start].stage]
        moves[end - 1] += activations[actions[start].stage]
    live, peak = 0.0, 0.0
    for number, action in enumerate(actions):
        kept, waiting = activations[action.stage], pending[action.stage]
        live += moves[number]
        change = {"F": kept, "B": -kept, "I": waiting - kept, "W": -waiting}[action.op]
        peak = max(peak, live, live + change)
        live += change
    return peak


def list_published_schedules(stages_per_rank: int) -> list[Schedule]:
    """Return all published schedules with this many stages per rank."""
    if stages_per_rank == 1:
        # GPipe has the bubble of 1F1B, and is better if messages take time.
        return [OneFOneB(), ZeroBubble1P(), ZeroBubbleH2(), OneFOneB(hide_latency=True), GPipe()]
    schedules: list[Schedule] = [
        ZeroBubble1P(stages_per_rank=stages_per_rank),
        Interleaved1F1B(stages_per_rank=stages_per_rank),
        LoopedBreadthFirst(stages_per_rank=stages_per_rank),
    ]
    return [*schedules, ZeroBubbleV(), DualPipeV(), VHalf(), VMin()] if stages_per_rank == 2 else schedules


def build_published_programs(stages_per_rank: int, ranks: int, microbatches: int) -> Iterator[Program]:
    """Yield the published schedules' programs, with the schedules' names as `choice`."""
    for schedule in list_published_schedules(stages_per_rank):
        name = type(schedule).__module__.rpartition(".")[2]
        yield attrs.evolve(schedule.program(ranks, microbatches), choice=name)


Cost = float | Sequence[float]
"""Cost of a slice: its times of F, B, I and W, or a factor of the times of a slice of cost 1."""


def _check_each(bound: Bound, *, may_be_empty: bool = True) -> Check:
    """Return a check for a number, or for every number in a list."""

    def find_fault(values: float | Sequence[float] | None) -> str | None:
        numbers = _list_cost_numbers(() if values is None else values)
        if not numbers and not may_be_empty and values is not None:
            return "the list is empty; write a number, or one for each slice"
        return next(filter(None, map(bound, numbers)), None)

    return find_fault


def _describe_slices_fault(values: Sequence[Cost]) -> str | None:
    faults = (_describe_cost_fault(cost) or _check_each(above(0))(cost) for cost in values)
    return next(filter(None, faults), None)


def _describe_cost_fault(cost: Cost) -> str | None:
    """Return the fault in a cost: a wrong number count, or a negative number; None if there is none."""
    numbers = _list_cost_numbers(cost)
    if len(numbers) not in (1, len(OPS)):
        return f"{numbers} has {len(numbers)} times; write one number, or {len(OPS)}, for {', '.join(OPS)}"
    return _check_each(at_least(0))(cost)


def _describe_kept_fractions_fault(values: float | Sequence[float]) -> str | None:
    """Return the fault in fractions outside 0 to 1; None if there is none."""
    most = max(_list_cost_numbers(values), default=0.0)
    too_much = f"{most} is above 1, which is all activations" if most > 1 else None
    return _check_each(at_least(0), may_be_empty=False)(values) or too_much


def _list_cost_numbers(cost: Cost) -> list[float]:
    return [cost] if isinstance(cost, float | int) else [*cost]


@attrs.frozen(kw_only=True)
class Recomputation:
    """Costs of a recompute policy: a number per slice, or one number for all slices."""

    again: float | Sequence[float] = setting(
        "additional time of a backward pass, as a fraction of the forward pass",
        check=_check_each(at_least(0), may_be_empty=False),
    )
    kept: float | Sequence[float] = setting(
        "fraction of the activations kept from the forward to the backward pass", check=_describe_kept_fractions_fault
    )


@component(impact="safe")
class Auto:
    """
    Fastest schedule for measured costs and a memory limit, published or found by a search. Times are in any unit.

    `slices` are the costs for equal parts of the model in order, usually single layers; the first slice includes the
    embedding, and the last slice the head. A stage has one or several slices, so that stages differ in layers if that
    is faster. A rank has one or two stages, whichever is faster. With `recompute`, every stage has the fastest policy
    that fits in memory: all its layers, every n-th layer, or none. With `offload`, activations of some stages wait in
    host memory instead, if that is faster.
    """

    forward: float = setting("time of a forward pass in a slice of cost 1", default=1.0, check=above(0))
    backward_input: float = setting("time of input gradients in a slice of cost 1", default=1.0, check=above(0))
    backward_weight: float = setting("time of weight gradients in a slice of cost 1", default=1.0, check=above(0))
    comm: float = setting("time of a message between ranks", default=0.0, check=at_least(0))
    slices: Sequence[Cost] = setting(
        "costs of the model's slices, or their times of F, B, I and W; if empty, a rank's equal share costs 1",
        factory=list,
        check=_describe_slices_fault,
    )
    per_stage: Cost = setting(
        "additional cost of every stage, or its times of F, B, I and W", default=0.0, check=_describe_cost_fault
    )
    activations: list[float] = setting(
        "sizes of a microbatch's activations by slice; if empty, 1 in a rank's share",
        factory=list,
        check=_check_each(above(0)),
    )
    pending: list[float] = setting(
        "sizes kept from input gradients until weight gradients, by slice; default: the activations",
        factory=list,
        check=_check_each(above(0)),
    )
    recompute: dict[Literal["selective", "blocks"], Recomputation] = setting(
        "costs of recompute policies that stages may use; if empty, `[stages] recompute` decides", factory=dict
    )
    offload: float | Sequence[float] | None = setting(
        "time to copy a slice's activations to host memory, a number or a list; without slices, of a rank's "
        "share; if left out, the feature `pipeline.offloaded` decides",
        default=None,
        check=_check_each(at_least(0), may_be_empty=False),
    )
    memory: float | None = setting(
        "limit of a rank's activations until their weight gradients, besides the recomputation of one pass; "
        "default: the peak of 1F1B",
        default=None,
        check=above(0),
    )
    stages_per_rank: int | None = setting(
        "stages per rank: 1 or 2; default: whichever is faster", default=None, check=between(1, 1001)
    )
    microbatches: int | None = setting(
        "microbatches of the step for which stages are partitioned; default: 4 per rank",
        default=None,
        check=between(1, 10_001),
    )
    trials: int = setting("number of policies tried in the search", default=TRIALS, check=between(0, 1_000_001))
    _cache: dict[tuple[int, int], FittedProgram] = internal(factory=dict)

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """Return the stages' ranks; UserError if slices or memory do not fit."""
        return self._find_fastest_planned_program(ranks).program.stage_to_rank

    def layers_by_stage(self, ranks: int, layers: int) -> StageSizes:
        """Return the numbers of layers by stage; UserError if layers are not divisible into the slices."""
        layers_per_slice, rest = (
            divmod(layers, self._consistent_slice_count) if self._consistent_slice_count else (1, 0)
        )
        if layers_per_slice > 1 and "blocks" in self.recompute:  # blocks are layers, so slices must be layers
            text = f"recompute.blocks takes a slice for each layer, and {layers} layers have "
            raise UserError(
                f"{text}{self._consistent_slice_count} slices; write {layers} costs in slices, one for each layer"
            )
        sizes = self._find_fastest_planned_program(ranks).sizes
        if not self._consistent_slice_count:
            return partition_evenly(layers, len(sizes))
        if rest or not layers_per_slice:
            slices = f"{self._consistent_slice_count} slices"
            raise UserError(
                f"{layers} layers are not divisible into {slices}; write {layers} costs in slices, one for each layer"
            )
        return tuple(layers_per_slice * size for size in sizes)

    def program(self, ranks: int, microbatches: int) -> Program:
        """Return all ranks' actions, in order; UserError if slices or memory do not fit."""
        planned = self._find_fastest_planned_program(ranks)
        if microbatches == planned.program.microbatches:
            return planned.program
        # Stages keep their layers when a step has another number of microbatches.
        return self._find_fastest_program(ranks, microbatches, planned).program

    def _find_fastest_planned_program(self, ranks: int) -> FittedProgram:
        """Return the fastest program for `microbatches`, whose stages all other programs keep."""
        return self._find_fastest_program(ranks, self.microbatches or 4 * ranks)

    def _find_fastest_program(
        self, ranks: int, microbatches: int, planned: FittedProgram | None = None
    ) -> FittedProgram:
        """
        Return the fastest program; with `planned`, only among programs with its stages.

        Raises UserError if none fits.
        """
        size = ranks, microbatches  # `planned` follows from `ranks`
        if size not in self._cache:
            counts = [planned.program.stages // ranks] if planned else self._list_stages_per_rank(ranks)
            # Programs without recomputation come first, so that they win if nothing is faster.
            recompute_choices = (False, True) if self.recompute else (False,)
            candidates = [
                fitted
                for recomputes in recompute_choices
                for count in counts
                for fitted in self._iterate_best_partitioned_programs(
                    ranks, microbatches, count, recomputes=recomputes, planned=planned
                )
            ]
            if self.offload is not None:
                candidates += [
                    fitted
                    for count in counts
                    for fitted in self._iterate_offloading_programs(ranks, microbatches, count, planned)
                ]
            shortest_makespan = min(fitted.makespan for fitted in candidates)
            equal = [fitted for fitted in candidates if fitted.makespan <= shortest_makespan * (1 + ROUNDING)]
            shortest = min(equal, key=_rank_equally_fast_programs)
            if shortest.makespan == math.inf:
                least = min(fitted.microbatch_peak_memory for fitted in candidates)
                text = f"a microbatch's activations are {least:g} on a rank"
                raise UserError(f"memory = {self._get_memory_limit(ranks):g}: {text}; write more")
            self._cache[size] = shortest
        return self._cache[size]

    def _iterate_best_partitioned_programs(
        self, ranks: int, microbatches: int, stages_per_rank: int, recomputes: bool, planned: FittedProgram | None
    ) -> Iterator[FittedProgram]:
        """Yield programs with `stages_per_rank` stages per rank, published or searched, with the best stage sizes."""
        slices, placement = (
            self._build_slices(ranks, stages_per_rank),
            assign_stages_in_vee(ranks) if stages_per_rank == 2 else assign_stages_in_loop(ranks, stages_per_rank),
        )
        limit = self._get_memory_limit(ranks)
        if planned:
            slices, placement = slices.merge_into_stages(planned.sizes), planned.program.stage_to_rank
        if not recomputes:
            slices = attrs.evolve(slices, recomputed=())
        comparable = []
        for program in build_published_programs(stages_per_rank, ranks, microbatches):
            if planned is None or program.stage_to_rank == placement:
                fitted = PartitionSearch(program, slices, limit).search_best_partition()
                comparable += [fitted] if fitted.program.stage_to_rank == placement else []
                yield fitted
        # If no program fits, the search starts from the stages with the least memory.
        first = min(comparable, key=lambda fitted: (fitted.makespan, fitted.microbatch_peak_memory)).sizes
        starts = slices.list_starting_partitions(placement)
        cuts = list(dict.fromkeys((first, starts[1])))
        # The first task of every cut recomputes nothing.
        by_cut = [[*slices.iterate_tasks_by_recompute_choice(placement, microbatches, limit, cut)] for cut in cuts]
        tasks = [
            task
            for of_cut in by_cut
            for task in of_cut[recomputes:]
            if task.microbatch_peak_memory <= limit * (1 + ROUNDING)
        ]
        policy = None
        for number, task in enumerate(select_promising_tasks(tasks) if recomputes else tasks):
            policy = search_best_policy(task, (policy, *STARTS) if policy else STARTS, self.trials // (1 + 3 * number))
            program = attrs.evolve(build_list_schedule(task, policy), choice="search")
            yield PartitionSearch(program, slices, limit).search_best_partition([*cuts, *starts])

    def _iterate_offloading_programs(
        self, ranks: int, microbatches: int, stages_per_rank: int, planned: FittedProgram | None
    ) -> Iterator[FittedProgram]:
        """Yield published programs with the stages offloaded that make them fit."""
        slices, copies = attrs.evolve(self._build_slices(ranks, stages_per_rank), recomputed=()), self.offload
        share = 1.0 if self._consistent_slice_count else ranks / len(slices)
        times = [*copies] if isinstance(copies, Sequence) else [share * (copies or 0.0)] * len(slices)
        for program in build_published_programs(stages_per_rank, ranks, microbatches):
            if planned is None:
                fitted = PartitionSearch(program, slices, math.inf).search_best_partition()
            elif program.stage_to_rank == planned.program.stage_to_rank:
                fitted = attrs.evolve(planned, program=program)
            else:
                continue
            yield offload_until_fit(fitted, slices, times, self._get_memory_limit(ranks))

    def _get_memory_limit(self, ranks: int) -> float:
        """Return `memory`, or the peak of 1F1B: a microbatch per rank in the largest stage, if ranks cost the same."""
        slices = self._build_slices(ranks, 1)
        most = attrs.evolve(slices, activations=np.maximum(slices.activations, slices.pending))
        return self.memory or ranks * float(
            most.sum_activations_by_stage([slices.list_starting_partitions(assign_stages_in_loop(ranks))[1]]).max()
        )

    def _list_stages_per_rank(self, ranks: int) -> list[int]:
        """
        Return the numbers to try: `stages_per_rank` if it is set, else 1 and, with enough slices, 2.

        Raises UserError for too few slices.
        """
        wanted = [self.stages_per_rank] if self.stages_per_rank else [1, 2]
        if counts := [count for count in wanted if ranks * count <= (self._consistent_slice_count or ranks * count)]:
            return counts
        stages = ranks * wanted[0]
        remedy = f"write {stages} or more in every setting that lists slices"
        raise UserError(f"{self._consistent_slice_count} slices of the model are too few for {stages} stages; {remedy}")

    @property
    def _consistent_slice_count(self) -> int:
        """Return the number of slices, or 0 if there are none; UserError if settings have different numbers."""
        lists: dict[str, Any] = {"slices": self.slices, "activations": self.activations, "pending": self.pending}
        lists["offload"] = self.offload
        for policy, costs in self.recompute.items():
            lists |= {f"{policy}.{name}": getattr(costs, name) for name in ("again", "kept")}
        counts = {name: len(values) for name, values in lists.items() if isinstance(values, Sequence) and values}
        first, count = next(iter(counts.items()), ("slices", 0))
        for name, other in counts.items():
            if other != count:
                raise UserError(f"{first} has {count} values, and {name} has {other}; write as many values in both")
        return count

    def _build_slices(self, ranks: int, stages_per_rank: int) -> ModelSlices:
        """Return the settings' slices; without any, one slice of equal cost for every stage."""
        number = self._consistent_slice_count or ranks * stages_per_rank
        share = [ranks / number] * number
        costs = np.array([self._get_op_times(cost) for cost in self.slices or share])
        activations = np.array(self.activations or share, dtype=np.float64)
        return ModelSlices(
            costs,
            activations,
            np.array(self._get_op_times(self.per_stage)),
            self.comm,
            np.array(self.pending, dtype=np.float64) if self.pending else activations,
            [
                RecomputeCosts(
                    policy, costs[:, FORWARD] * np.array(recompute.again), activations * np.array(recompute.kept)
                )
                for policy, recompute in self.recompute.items()
            ],
        )

    def _get_op_times(self, cost: Cost) -> list[float]:
        """Return a cost's times of F, B, I and W."""
        if len(numbers := _list_cost_numbers(cost)) == len(OPS):
            return numbers
        unit = self.forward, self.backward_input + self.backward_weight, self.backward_input, self.backward_weight
        return [numbers[0] * seconds for seconds in unit]


def _rank_equally_fast_programs(fitted: FittedProgram) -> tuple[bool, bool, int]:
    """Return a sort key: programs without recomputation and copies come first, then those with fewer messages."""
    program = fitted.program
    recomputes = any(policy != "none" for policy in program.recompute)
    messages = int((find_consumer_ranks(program) != program.rank_by_action).sum())
    return recomputes, bool(program.offloaded), messages
