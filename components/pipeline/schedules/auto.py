"""
Auto: the fastest schedule for measured costs that fits in memory.

Every published schedule is simulated with the costs of the model's slices and of messages. Then a program on a V is
searched for in the same memory (`pipeline/program/policy_search.py`), as Qi et al. do in "Zero Bubble Pipeline
Parallelism", ICLR 2024, section 3, and in "Pipeline Parallelism with Controllable Memory", NeurIPS 2024. The shortest
of all is taken, so it is never longer than a published one. All ranks find the same.
"""

from collections.abc import Iterator

import attrs

from drawloom.components.pipeline.program.builders import loop, vee
from drawloom.components.pipeline.program.list_scheduling import Task, list_schedule, peak_activations
from drawloom.components.pipeline.program.policy_search import TRIALS, best_policy
from drawloom.components.pipeline.program.timing import Costs, time
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
from drawloom.components.ports.program import Program
from drawloom.graph import UserError, above, at_least, component, setting


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


def _positive(values: list[float]) -> str | None:
    return None if all(value > 0 for value in values) else f"{min(values)} is not above 0"


@component(impact="safe")
class Auto:
    """
    The fastest schedule for measured costs and a memory limit, published or found by a search. Times are in any unit.

    `slices` cuts the model into equal slices, and says what each costs, in order; a stage is one slice or several. With
    two slices for each rank, stages of one and of two slices are compared.
    """

    forward: float = setting(default=1.0, check=above(0), doc="time of a microbatch's forward in a slice of cost 1")
    backward_input: float = setting(default=1.0, check=above(0), doc="time of its input gradients")
    backward_weight: float = setting(default=1.0, check=above(0), doc="time of its weight gradients")
    comm: float = setting(default=0.0, check=at_least(0), doc="time that a message is on its way")
    slices: list[float] = setting(
        factory=list, check=_positive, doc="cost of each slice of the model; if empty, a rank's equal share costs 1"
    )
    activations: list[float] = setting(
        factory=list, check=_positive, doc="activations of a microbatch in each slice; if empty, 1 in a rank's share"
    )
    memory: float | None = setting(
        default=None,
        check=above(0),
        doc="activations that a rank may hold until weight gradients; those of a microbatch in all slices if left out",
    )
    stages_per_rank: int | None = setting(
        default=None, check=at_least(1), doc="stages on each rank; 1 or 2, what is faster, if left out"
    )
    microbatches: int | None = setting(
        default=None, check=at_least(1), doc="of a step, for which stages are placed; 4 a rank if left out"
    )
    trials: int = setting(default=TRIALS, check=at_least(0), doc="orders tried in the search; more take longer")
    _found: dict[tuple[int, int], Program] = attrs.field(init=False, factory=dict)

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage; UserError if slices or memory do not fit."""
        return self._fastest(ranks, self.microbatches or 4 * ranks).stage_to_rank

    def program(self, ranks: int, microbatches: int) -> Program:
        """The actions of every rank, in order; UserError if slices or memory do not fit."""
        planned = self._fastest(ranks, self.microbatches or 4 * ranks)
        if microbatches == planned.microbatches:
            return planned
        # Stages can't move between ranks when a step has another number of microbatches.
        return self._fastest(ranks, microbatches, planned.stage_to_rank)

    def _fastest(self, ranks: int, microbatches: int, placement: tuple[int, ...] | None = None) -> Program:
        size = ranks, microbatches
        if size not in self._found:
            programs = list(self._programs(ranks, microbatches, placement))
            lengths = [time(program, self._task(program.stage_to_rank, 1).costs).makespan for program in programs]
            self._found[size] = programs[lengths.index(min(lengths))]
        return self._found[size]

    def _programs(self, ranks: int, microbatches: int, placement: tuple[int, ...] | None) -> Iterator[Program]:
        """All programs that fit, on the stages of a placement or on any."""
        counts = self._stage_counts(ranks)
        for schedule in (schedule for count in counts for schedule in published(count)):
            if placement in (None, schedule.stage_to_rank(ranks)):
                program = schedule.program(ranks, microbatches)
                task = self._task(program.stage_to_rank, microbatches)
                if max(peak_activations(program, task.activations)) <= task.limit * (1 + 1e-9):
                    yield program
        task = self._task(placement or (vee(ranks) if 2 in counts else loop(ranks, counts[0])), microbatches)
        yield list_schedule(task, best_policy(task, trials=self.trials))

    def _stage_counts(self, ranks: int) -> list[int]:
        """Numbers of stages on a rank into which the slices can be joined."""
        wanted = [self.stages_per_rank] if self.stages_per_rank else [1, 2]
        found = [count for count in wanted if all(len(each) % (ranks * count) == 0 for each in self._by_slice)]
        if found:
            return found
        sizes = " and ".join(f"{len(each)} {name}" for each, name in zip(self._by_slice, NAMES, strict=True) if each)
        hint = f"write {2 * ranks} of each" if not self.stages_per_rank else f"write {ranks * wanted[0]} of each"
        raise UserError(f"{sizes} can't be joined to equally many slices for every stage of {ranks} ranks; {hint}")

    @property
    def _by_slice(self) -> tuple[list[float], list[float]]:
        return self.slices, self.activations

    def _task(self, placement: tuple[int, ...], microbatches: int) -> Task:
        """What a program on these stages costs and holds, with the memory limit."""
        share = (max(placement) + 1) / len(placement)
        factors, activations = (_joined(each, len(placement)) or (share,) * len(placement) for each in self._by_slice)
        costs = Costs(self.forward, self.backward_input, self.backward_weight, comm=self.comm, factors=factors)
        task = Task(placement, microbatches, costs, activations, self.memory or sum(activations))
        if (least := max(task.activations_by_rank)) > task.limit * (1 + 1e-9):
            raise UserError(f"memory = {task.limit:g}: a microbatch's activations are {least:g} on a rank; write more")
        return task


NAMES = "slices", "activations"


def _joined(values: list[float], stages: int) -> tuple[float, ...]:
    """The sums over as many consecutive slices as a stage has; empty if there are none."""
    size = len(values) // stages
    return tuple(sum(values[start : start + size]) for start in range(0, len(values), size or 1))
