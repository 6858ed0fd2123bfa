"""
Auto: the fastest schedule for measured costs that fits in memory, and the layers of its stages.

Every published schedule is simulated with the costs of the model's slices and of messages, and its stages are cut where
it takes least time (`pipeline/program/partition.py`). Then programs are searched for in the same memory
(`pipeline/program/policy_search.py`), as Qi et al. do in "Zero Bubble Pipeline Parallelism", ICLR 2024, section 3, and
in "Pipeline Parallelism with Controllable Memory", NeurIPS 2024. The shortest of all is taken, so it is never longer
than a published one. All ranks find the same.

Where memory is short, stages may compute activations again, on each rank as little as makes a program fit
(`pipeline/program/recomputation.py`): one that holds more can be faster than all that fit without.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import attrs
import numpy as np

from drawloom.components.pipeline.program.builders import loop, vee
from drawloom.components.pipeline.program.list_scheduling import ROUNDING, list_schedule
from drawloom.components.pipeline.program.partition import Fit, Fitted, Sizes, Slices, even
from drawloom.components.pipeline.program.policy_search import STARTS, TRIALS, best_policy, promising
from drawloom.components.pipeline.program.recomputation import Recomputed
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
from drawloom.components.ports.pipeline import Schedule
from drawloom.components.ports.program import FORWARD, OPS, Program
from drawloom.graph import UserError, above, at_least, between, component, setting


def published(stages_per_rank: int) -> list[Schedule]:
    """Every published schedule with this number of stages on a rank."""
    if stages_per_rank == 1:
        # GPipe's bubble is that of 1F1B; it is the better one where messages take time.
        return [OneFOneB(), ZeroBubble1P(), ZeroBubbleH2(), OneFOneB(hide_latency=True), GPipe()]
    found: list[Schedule] = [
        ZeroBubble1P(stages_per_rank=stages_per_rank),
        Interleaved1F1B(stages_per_rank=stages_per_rank),
        LoopedBreadthFirst(stages_per_rank=stages_per_rank),
    ]
    return [*found, ZeroBubbleV(), DualPipeV(), VHalf(), VMin()] if stages_per_rank == 2 else found


Cost = float | Sequence[float]
"""The cost of a slice: its times of F, B, I and W, or a number times those of a slice of cost 1."""


def _fault_of_activations(values: list[float]) -> str | None:
    return None if all(value > 0 for value in values) else f"{min(values)} is not above 0"


def _fault_of_slices(values: Sequence[Cost]) -> str | None:
    small = [least for each in values if (least := min(_numbers(each), default=1.0)) <= 0]
    faults = [fault for each in values if (fault := _fault_of_cost(each))]
    return next(iter(faults), None) or (f"{small[0]} is not above 0" if small else None)


def _fault_of_cost(cost: Cost) -> str | None:
    numbers = _numbers(cost)
    if len(numbers) not in (1, len(OPS)):
        return f"{numbers} has {len(numbers)} times; write one number, or {len(OPS)}, for {', '.join(OPS)}"
    return None if min(numbers) >= 0 else f"{min(numbers)} is below 0"


def _fault_of_parts(parts: float | Sequence[float]) -> str | None:
    numbers = _numbers(parts)
    if not numbers:
        return "the list is empty; write a number, or one for each slice"
    return None if min(numbers) >= 0 else f"{min(numbers)} is below 0"


def _fault_of_kept(parts: float | Sequence[float]) -> str | None:
    most = max(_numbers(parts), default=0.0)
    return _fault_of_parts(parts) or (f"{most} is above 1, which is all activations" if most > 1 else None)


def _numbers(cost: Cost) -> list[float]:
    return [cost] if isinstance(cost, float | int) else [*cost]


@attrs.frozen(kw_only=True)
class Recomputation:
    """What it takes to recompute, and what it leaves: a number for each slice, or one for all."""

    again: float | Sequence[float] = setting(
        check=_fault_of_parts, doc="part of the forward's time by which a backward takes longer"
    )
    kept: float | Sequence[float] = setting(
        check=_fault_of_kept, doc="part of the activations that is held from the forward until the backward"
    )


@component(impact="safe")
class Auto:
    """
    The fastest schedule for measured costs and a memory limit, published or found by a search. Times are in any unit.

    `slices` cuts the model into parts of as many layers each, mostly of one, and says what each costs, in order; the
    first one has the embedding, and the last one the head. A stage gets one or several of them, so that layers of
    stages differ where that is faster. Stages on a rank are one or two, what is faster. With `recompute` a
    stage also computes again what is fastest in the memory that there is: all of its layers, one in some, or none.
    """

    forward: float = setting(default=1.0, check=above(0), doc="time of a microbatch's forward in a slice of cost 1")
    backward_input: float = setting(default=1.0, check=above(0), doc="time of its input gradients")
    backward_weight: float = setting(default=1.0, check=above(0), doc="time of its weight gradients")
    comm: float = setting(default=0.0, check=at_least(0), doc="time that a message is on its way")
    slices: Sequence[Cost] = setting(
        factory=list,
        check=_fault_of_slices,
        doc="cost of each slice of the model, or its times of F, B, I and W; if empty, a rank's equal share costs 1",
    )
    per_stage: Cost = setting(
        default=0.0, check=_fault_of_cost, doc="cost that every stage has besides, or its times of F, B, I and W"
    )
    activations: list[float] = setting(
        factory=list,
        check=_fault_of_activations,
        doc="activations of a microbatch in each slice; if empty, 1 in a rank's share",
    )
    pending: list[float] = setting(
        factory=list,
        check=_fault_of_activations,
        doc="what of these is held from input gradients until weight gradients; if empty, all",
    )
    recompute: dict[Literal["selective", "blocks"], Recomputation] = setting(
        factory=dict, doc="what stages may recompute, by policy of `[stages] recompute`; if empty, that setting says it"
    )
    memory: float | None = setting(
        default=None,
        check=above(0),
        doc="activations that a rank may hold until weight gradients, besides what one backward pass computes again; "
        "if left out, those of a microbatch for each rank in the stage that holds most, where ranks cost alike",
    )
    stages_per_rank: int | None = setting(
        default=None, check=between(1, 1001), doc="stages on each rank; 1 or 2, what is faster, if left out"
    )
    microbatches: int | None = setting(
        default=None,
        check=between(1, 10_001),
        doc="of a step, for which stages are placed and cut; 4 a rank if left out",
    )
    trials: int = setting(
        default=TRIALS, check=between(0, 1_000_001), doc="orders tried in the search; more take longer"
    )
    _found: dict[tuple[int, int], Fitted] = attrs.field(init=False, factory=dict)

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage; UserError if slices or memory do not fit."""
        return self._planned(ranks).program.stage_to_rank

    def layers_by_stage(self, ranks: int, layers: int) -> Sizes:
        """How many of a model's layers each stage has; UserError if they can't be cut into the slices."""
        each, rest = divmod(layers, self._slice_count) if self._slice_count else (1, 0)
        if each > 1 and "blocks" in self.recompute:  # which may be of one layer in some, as one slice in some
            text = f"recompute.blocks takes a slice for each layer, and {layers} layers have {self._slice_count} slices"
            raise UserError(f"{text}; write {layers} slices")
        sizes = self._planned(ranks).sizes
        if not self._slice_count:
            return even(layers, len(sizes))
        if rest or not each:
            slices = f"{self._slice_count} slices"
            raise UserError(f"{layers} layers can't be cut into {slices} of as many each; write {layers} slices")
        return tuple(each * size for size in sizes)

    def program(self, ranks: int, microbatches: int) -> Program:
        """The actions of every rank, in order; UserError if slices or memory do not fit."""
        planned = self._planned(ranks)
        if microbatches == planned.program.microbatches:
            return planned.program
        # Stages can't change when a step has another number of microbatches.
        return self._fastest(ranks, microbatches, planned).program

    def _planned(self, ranks: int) -> Fitted:
        return self._fastest(ranks, self.microbatches or 4 * ranks)

    def _fastest(self, ranks: int, microbatches: int, planned: Fitted | None = None) -> Fitted:
        """The shortest program, or the shortest one on the stages of another."""
        size = ranks, microbatches
        if size not in self._found:
            counts = [planned.program.stages // ranks] if planned else self._stage_counts(ranks)
            # What is found without recomputation comes first, so that it is taken where nothing is faster.
            ways = [(count, again) for again in (False, True)[: 1 + bool(self.recompute)] for count in counts]
            found = [
                fitted
                for count, again in ways
                for fitted in self._of_count(ranks, microbatches, count, recomputes=again, planned=planned)
            ]
            shortest = min(found, key=lambda each: each.makespan)  # the first of several
            if shortest.makespan == math.inf:
                least = min(each.least for each in found)
                text = f"a microbatch's activations are {least:g} on a rank"
                raise UserError(f"memory = {self._limit(ranks):g}: {text}; write more")
            self._found[size] = shortest
        return self._found[size]

    def _of_count(
        self, ranks: int, microbatches: int, count: int, recomputes: bool, planned: Fitted | None
    ) -> Iterator[Fitted]:
        """Programs with a number of stages on each rank: published ones, and what a search finds."""
        slices, placement = self._slices(ranks, count), vee(ranks) if count == 2 else loop(ranks, count)
        limit = self._limit(ranks)
        if planned:
            slices, placement = slices.joined(planned.sizes), planned.program.stage_to_rank
        if not recomputes:
            slices = attrs.evolve(slices, recomputed=())
        alike = []
        for schedule in published(count):
            if planned is None or schedule.stage_to_rank(ranks) == placement:
                found = Fit(schedule.program(ranks, microbatches), slices, limit).best()
                alike += [found] if found.program.stage_to_rank == placement else []
                yield found
        # Where none fits, the search starts from the stages that hold least.
        first = min(alike, key=lambda each: (each.makespan, each.least)).sizes
        starts = slices.starts(placement)
        cuts = list(dict.fromkeys((first, starts[1])))
        # Of each cut, the first task recomputes nothing.
        each = [[*slices.tasks(placement, microbatches, limit, cut)] for cut in cuts]
        tasks = [task for some in each for task in some[recomputes:] if task.least <= limit * (1 + ROUNDING)]
        policy = None
        for number, task in enumerate(promising(tasks) if recomputes else tasks):
            policy = best_policy(task, (policy, *STARTS) if policy else STARTS, self.trials // (1 + 3 * number))
            yield Fit(list_schedule(task, policy), slices, limit).best([*cuts, *starts])

    def _limit(self, ranks: int) -> float:
        """What a rank may hold: `memory`, or a microbatch for each rank in the stage that holds most at any time."""
        slices = self._slices(ranks, 1)
        most = attrs.evolve(slices, activations=np.maximum(slices.activations, slices.pending))
        return self.memory or ranks * float(most.held_by([slices.starts(loop(ranks))[1]]).max())

    def _stage_counts(self, ranks: int) -> list[int]:
        """Numbers of stages on a rank for which there are enough slices."""
        wanted = [self.stages_per_rank] if self.stages_per_rank else [1, 2]
        if found := [count for count in wanted if ranks * count <= (self._slice_count or ranks * count)]:
            return found
        stages = ranks * wanted[0]
        raise UserError(f"{self._slice_count} slices are too few for {stages} stages; write {stages} of each or more")

    @property
    def _slice_count(self) -> int:
        """How many slices there are, 0 if they are not given; UserError if costs and activations are of others."""
        given = {"slices": self.slices, "activations": self.activations, "pending": self.pending}
        for policy, each in self.recompute.items():
            given |= {f"{policy}.{name}": getattr(each, name) for name in ("again", "kept")}
        counts = {name: len(each) for name, each in given.items() if isinstance(each, Sequence) and each}
        first, count = next(iter(counts.items()), ("slices", 0))
        for name, other in counts.items():
            if other != count:
                raise UserError(f"{count} {first} have {other} {name}; write as many of each")
        return count

    def _slices(self, ranks: int, count: int) -> Slices:
        """The slices, or equal shares of stages if they are not given."""
        number = self._slice_count or ranks * count
        share = [ranks / number] * number
        costs = np.array([self._times(cost) for cost in self.slices or share])
        held = np.array(self.activations or share, dtype=np.float64)
        return Slices(
            costs,
            held,
            np.array(self._times(self.per_stage)),
            self.comm,
            np.array(self.pending, dtype=np.float64) if self.pending else held,
            [
                Recomputed(policy, costs[:, FORWARD] * np.array(each.again), held * np.array(each.kept))
                for policy, each in self.recompute.items()
            ],
        )

    def _times(self, cost: Cost) -> list[float]:
        """The times of F, B, I and W."""
        if len(numbers := _numbers(cost)) == len(OPS):
            return numbers
        one = self.forward, self.backward_input + self.backward_weight, self.backward_input, self.backward_weight
        return [numbers[0] * each for each in one]
