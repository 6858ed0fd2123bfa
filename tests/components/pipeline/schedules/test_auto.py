"""The search for a schedule."""

import math
import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
import pytest

from drawloom.components.pipeline.from_csv import find_violations
from drawloom.components.pipeline.program.list_scheduling import compute_peak_activations
from drawloom.components.pipeline.program.notation import format_program_csv
from drawloom.components.pipeline.program.timing import Costs, CostTable, compute_timing
from drawloom.components.pipeline.schedules import auto
from drawloom.components.pipeline.schedules.auto import Auto, Recomputation, list_published_schedules
from drawloom.components.pipeline.simulation.simulator import simulate
from drawloom.components.planning.stage_costs import PassCost, StageCosts
from drawloom.components.planning.timeline import compute_peak_memory
from drawloom.components.ports.program import Program, iterate_actions
from drawloom.components.ports.stages import Recompute
from drawloom.graph import UserError


def _makespan(program: Program, lengths: Sequence[Sequence[float]], comm: float) -> float:
    """How long a program takes, action by action, if stages have these durations of F, B, I and W."""
    ends: dict[tuple[int, str, int], float] = {}
    lines = [list(iterate_actions(program.rank_program(rank))) for rank in range(program.ranks)]
    free, last, rank = [0.0] * program.ranks, program.stages - 1, 0
    while any(lines):
        rank = (rank + 1) % program.ranks
        while lines[rank]:
            stage, op, number = lines[rank][0].stage, lines[rank][0].op, lines[rank][0].microbatch
            source = (stage - 1, "F") if op == "F" else (stage + 1, "I") if stage < last else (last, "F")
            needed = () if op == "W" or (op, stage) == ("F", 0) else ((*source, number),)
            if any(needed_action not in ends for needed_action in needed):
                break
            late = [
                ends[needed_action] + comm * (program.stage_to_rank[needed_action[0]] != rank)
                for needed_action in needed
            ]
            free[rank] = max([free[rank], *late]) + lengths[stage]["FBIW".index(op)]
            ends[stage, "I" if op == "B" else str(op), number] = free[rank]
            lines[rank].pop(0)
    return max(free)


def _peak(program: Program, activations: Sequence[float], pending: Sequence[float] | None = None) -> float:
    """Return the most memory of a rank: whole until input gradients, then pending until weight gradients."""
    peaks, pending = [], activations if pending is None else pending
    for rank in range(program.ranks):
        now = 0.0
        for action in iterate_actions(program.rank_program(rank)):
            before, behind = activations[action.stage], pending[action.stage]
            now += {"F": before, "B": -before, "I": behind - before, "W": -behind}[str(action.op)]
            peaks.append(now)
    return max(peaks)


def _sum_per_stage(values: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Sum the slices' values by stage."""
    return [sum(values[sum(sizes[:stage]) : sum(sizes[: stage + 1])]) for stage in range(len(sizes))]


@pytest.mark.parametrize("seed", range(6))
def test_no_partition_of_any_published_schedule_that_fits_is_faster(seed: int) -> None:
    """
    An exhaustive trial over all partitions of a few layers and all published schedules has no faster one that fits.
    Layers differ in costs, bytes, and durations by op; messages take time, and stages have their own costs.
    """
    chance = random.Random(seed)
    ranks, layers, microbatches = chance.choice([(2, 5, 4), (2, 6, 3), (3, 6, 4)])
    slices = [[chance.uniform(0.5, 2) for _ in range(4)] for _ in range(layers)]
    activations = [chance.uniform(1, 2) for _ in range(layers)]
    per_stage, comm = [chance.choice([0.0, 0.5])] * 4, chance.choice([0.0, 0.4])
    limit = sum(activations) * chance.choice([0.8, 1.0, 2.0])

    def makespan_if_it_fits(program: Program, sizes: Sequence[int]) -> float:
        stages = [_sum_per_stage([schedule[op] for schedule in slices], sizes) for op in range(4)]
        lengths = [[stages[op][stage] + per_stage[op] for op in range(4)] for stage in range(len(sizes))]
        return (
            _makespan(program, lengths, comm)
            if _peak(program, _sum_per_stage(activations, sizes)) <= limit
            else math.inf
        )

    best = math.inf
    for program in (
        schedule.program(ranks, microbatches) for count in (1, 2) for schedule in list_published_schedules(count)
    ):
        for cuts in combinations(range(1, layers), program.stages - 1):
            sizes = [last - first for first, last in pairwise((0, *cuts, layers))]
            best = min(best, makespan_if_it_fits(program, sizes))
    settings: dict[str, Any] = {
        "comm": comm,
        "memory": limit,
        "per_stage": per_stage,
        "microbatches": microbatches,
        "trials": 20,
    }
    made = Auto(slices=slices, activations=activations, **settings)
    ours = makespan_if_it_fits(made.program(ranks, microbatches), made.layers_by_stage(ranks, layers))
    assert ours <= best * (1 + 1e-9) < math.inf


AGAIN: dict[Literal["selective", "blocks"], Recomputation] = {
    "blocks": Recomputation(again=0.8, kept=0.1),
    "selective": Recomputation(again=0.2, kept=0.6),
}
"""What may be recomputed."""


def _recompute_fractions(policy: Recompute, layers: int) -> tuple[float, float]:
    """Return the repeated part of a forward, and the kept part of the activations, for some layers."""
    if policy == "none":
        return 0.0, 1.0
    if policy == "selective" or policy == "quantized":
        return 0.2, 0.6
    part = len(range(0, layers, 1 if policy == "blocks" else policy)) / layers
    return 0.8 * part, 1 - 0.9 * part


@attrs.frozen
class Model:
    """Layers with a forward cost, equal to the input and the weight gradients' costs, and bytes."""

    slices: list[float]
    activations: list[float]
    pending: list[float]
    comm: float = 0.3

    def makespan_if_it_fits(
        self, program: Program, sizes: Sequence[int], chosen: Sequence[Recompute], limit: float
    ) -> float:
        """How long a program takes with a partition whose stages recompute so; infinite if it does not fit."""
        recomputed = [_recompute_fractions(policy, size) for policy, size in zip(chosen, sizes, strict=True)]
        kept = [
            part * size for (_, part), size in zip(recomputed, _sum_per_stage(self.activations, sizes), strict=True)
        ]
        if _peak(program, kept, _sum_per_stage(self.pending, sizes)) > limit * (1 + 1e-9):
            return math.inf
        costs = zip(recomputed, _sum_per_stage(self.slices, sizes), strict=True)
        return _makespan(program, [[f, (2 + again) * f, (1 + again) * f, f] for (again, _), f in costs], self.comm)

    def auto(self, ranks: int, limit: float, **settings: Any) -> tuple[Program, float]:
        """Return the program found within the limit, and its makespan."""
        costs: dict[str, Any] = {
            "slices": self.slices,
            "activations": self.activations,
            "pending": self.pending,
            "comm": self.comm,
        }
        made = Auto(memory=limit, **costs, **settings)
        program, sizes = made.program(ranks, settings["microbatches"]), made.layers_by_stage(ranks, len(self.slices))
        return program, self.makespan_if_it_fits(program, sizes, program.recompute or ["none"] * len(sizes), limit)


@pytest.mark.parametrize("seed", range(4))
def test_no_published_schedule_that_fits_with_any_recomputation_is_faster(seed: int) -> None:
    """
    An exhaustive trial over all partitions of a few layers, and all stages' policies, has no faster one that fits.
    """
    chance = random.Random(seed)
    ranks, layers, microbatches = 2, 5, chance.choice([3, 4])
    slices, activations = ([chance.uniform(*ends) for _ in range(layers)] for ends in ((0.5, 2.0), (1.0, 2.0)))
    model = Model(slices, activations, [schedule * chance.uniform(0.5, 1) for schedule in activations])
    limit = sum(activations) * chance.choice([0.5, 0.6, 0.7])
    policies: list[Recompute] = ["none", "selective", "blocks", 2, 3, 4]
    best = plain = math.inf
    for program in (schedule.program(ranks, microbatches) for schedule in list_published_schedules(1)):
        for cut in range(1, layers):
            sizes = [cut, layers - cut]
            plain = min(plain, model.makespan_if_it_fits(program, sizes, ["none"] * ranks, limit))
            best = min(
                best,
                *(
                    model.makespan_if_it_fits(program, sizes, schedule, limit)
                    for schedule in product(policies, repeat=ranks)
                ),
            )
    settings = {"stages_per_rank": 1, "trials": 20, "microbatches": microbatches}
    program, ours = model.auto(ranks, limit, recompute=AGAIN, **settings)
    assert find_violations(program) == []
    assert ours <= best * (1 + 1e-9) < math.inf
    assert best < plain  # there is something to choose


@pytest.mark.parametrize(("ranks", "memory"), [(2, 1.2), (4, 1.5), (4, 2.0)])
def test_recomputation_makes_room_for_faster_programs(ranks: int, memory: float) -> None:
    """If memory is short, the schedule fits, and is faster than without; if there is enough, nothing is recomputed."""
    share = [0.25] * (4 * ranks)
    model, settings = Model(share, share, share), {"microbatches": 4 * ranks, "trials": 40}
    _, ours = model.auto(ranks, memory, recompute=AGAIN, **settings)
    assert ours < 0.97 * model.auto(ranks, memory, **settings)[1] < math.inf
    enough, _ = model.auto(ranks, 4.0 * ranks, recompute=AGAIN, **settings)
    assert not {*enough.recompute} - {"none"}


def resident_peak(program: Program) -> int:
    """Return the most memory of a rank in hundredths of a stage's activations, by the planner's account."""
    passes = {
        "F": PassCost(1.0, peak_delta=100, kept_bytes={"x": 100}),
        "I": PassCost(1.0, kept_bytes={"x": 100}),
        **dict.fromkeys("BW", PassCost(1.0)),
    }
    costs, nothing = {stage: StageCosts(passes, 0) for stage in range(program.stages)}, [0] * program.stages
    return max(
        compute_peak_memory(program, rank, costs, dict(enumerate(nothing))).bytes for rank in range(program.ranks)
    )


@pytest.mark.parametrize("memory", [2.0, 3.0])
@pytest.mark.parametrize("copy", [0.1, 2.0, 9.0])
def test_no_published_schedule_that_fits_with_any_offloading_is_faster(memory: float, copy: float) -> None:
    """Over a fast link it offloads if memory is short; no published schedule that fits is faster by any offloading."""
    settings: dict[str, Any] = {
        "slices": [1.0] * 4,
        "memory": memory,
        "stages_per_rank": 1,
        "microbatches": 8,
        "trials": 40,
    }
    without, auto = Auto(**settings).program(4, 8), Auto(**settings, offload=copy).program(4, 8)
    table = CostTable(lengths=np.tile([1.0, 2.0, 1.0, 1.0], (4, 1)), offload_by_stage=np.full(4, copy))
    makespan = simulate(auto, table).makespan
    assert makespan <= simulate(without, table).makespan
    assert bool(auto.offloaded) == (copy < 9 and memory < 3) and resident_peak(auto) <= 100 * memory
    for schedule in list_published_schedules(1):
        for chosen in product((False, True), repeat=4):
            offloaded = frozenset(stage for stage, is_chosen in enumerate(chosen) if is_chosen)
            other = attrs.evolve(schedule.program(4, 8), offloaded=offloaded)
            if resident_peak(other) <= 100 * memory:
                assert makespan <= simulate(other, table).makespan * (1 + 1e-9), (schedule, offloaded)


def test_two_stages_that_cost_more_than_one_are_not_taken() -> None:
    """If a stage costs something besides its layers, a rank gets one; otherwise it gets two."""
    for per_stage, stages in ((0.0, 2), (0.5, 1)):
        made = Auto(slices=[0.25] * 16, per_stage=per_stage, memory=4.0, trials=20)
        assert len(made.stage_to_rank(4)) == 4 * stages


def test_the_stage_with_a_head_has_fewer_layers() -> None:
    """If the last layer and the head cost as much as three, it balances them, and is faster than equal stages."""
    slices = [1.0] * 11 + [3.0]
    made = Auto(slices=slices, stages_per_rank=1, microbatches=16, trials=20)
    sizes = made.layers_by_stage(4, 12)
    assert sizes[-1] == min(sizes) < 3
    lengths = [_sum_per_stage(slices, layers) for layers in (sizes, (3, 3, 3, 3))]
    ours, other = ([[f, 2 * f, f, f] for f in stages] for stages in lengths)
    best = min(_makespan(schedule.program(4, 16), other, 0.0) for schedule in list_published_schedules(1))
    assert _makespan(made.program(4, 16), ours, 0.0) < 0.9 * best


def _costs(program: Program, last: float, latency: float) -> Costs:
    """Return costs in which a rank's stages take 1 together, and the last stage `last` - 1 more."""
    stages = program.stages // program.ranks
    factors = [1 / stages] * program.stages
    factors[-1] += last - 1
    return CostTable(comm=latency, lengths=np.outer(factors, [1.0, 2.0, 1.0, 1.0]))


@pytest.mark.parametrize(("last", "latency"), [(1.0, 0.0), (1.0, 0.25), (1.3, 0.25)])
def test_no_published_schedule_that_fits_is_faster(last: float, latency: float) -> None:
    """In cells of the benchmark `pipeline_auto`, it keeps to the memory limit and is at least as fast as all others."""
    for ranks, memory in product((2, 4), (0.5, 1, 2)):
        limit, microbatches = memory * ranks, 2 * ranks
        slices = [0.5] * (2 * ranks - 1) + [last - 0.5]
        made = Auto(comm=latency, slices=slices, memory=limit, microbatches=microbatches)
        program = made.program(ranks, microbatches)
        assert find_violations(program) == []
        stages = program.stages // ranks
        assert max(simulate(program, Costs()).peak_microbatches_in_flight) <= limit * stages
        ours = compute_timing(program, _costs(program, last, latency)).makespan
        for other in (
            schedule.program(ranks, microbatches) for number in (1, 2) for schedule in list_published_schedules(number)
        ):
            if max(simulate(other, Costs()).peak_microbatches_in_flight) <= limit * other.stages // ranks:
                assert ours <= compute_timing(other, _costs(other, last, latency)).makespan + 1e-9


def test_every_schedule_for_the_executor_is_compared() -> None:
    """All components of the folder, except itself and the circular pipeline's schedule with its own executor."""
    names = {path.stem for path in Path(auto.__file__).parent.glob("[a-z]*.py")} - {"auto", "circular"}
    programs = [program for count in (1, 2) for program in auto.build_published_programs(count, 2, 4)]
    assert {program.choice for program in programs} == names


def test_the_fewest_messages_decide_among_equally_fast_programs() -> None:
    """With equal stages the interleaved zero bubble is as fast as zero bubble V, and sends more tensors."""
    program = Auto().program(2, 8)
    published = list(auto.build_published_programs(2, 2, 8))
    chosen, other = (
        next(made for made in published if made.choice == name) for name in ("zero_bubble_v", "zero_bubble_1p")
    )
    assert program.choice == "zero_bubble_v" and program.stage_to_rank == chosen.stage_to_rank
    costs = Costs(0.5, 0.5, 0.5)
    assert compute_timing(program, costs).makespan == compute_timing(other, costs).makespan
    assert simulate(program, costs).message_count == 32 < simulate(other, costs).message_count == 48
    assert Auto(slices=[0.5] * 15 + [0.8], comm=0.25).program(8, 32).choice == "search"


def test_a_costly_last_stage_and_slow_messages_are_made_up_for() -> None:
    """With 1.3 times the cost in the last share and a latency of 0.25, it is 2 % faster than every published one."""
    ours = Auto(comm=0.25, slices=[0.5] * 15 + [0.8], microbatches=32).program(8, 32)
    others = [schedule.program(8, 32) for number in (1, 2) for schedule in list_published_schedules(number)]
    fitting = [
        schedule
        for schedule in others
        if max(simulate(schedule, Costs()).peak_microbatches_in_flight) <= 8 * schedule.stages // 8
    ]
    best = min(compute_timing(schedule, _costs(schedule, 1.3, 0.25)).makespan for schedule in fitting)
    assert compute_timing(ours, _costs(ours, 1.3, 0.25)).makespan < 0.98 * best


def test_every_process_finds_the_same() -> None:
    """A process with another seed of hashes finds the same program, action by action, and the same stages."""
    settings = "Auto(comm=0.3, memory=30.0, slices=[1.0] * 23 + [4.0])"
    path = "drawloom.components.pipeline"
    script = (
        f"from {path}.schedules.auto import Auto; from {path}.program.notation import format_program_csv;"
        f"made = {settings}; print(format_program_csv(made.program(4, 8)), made.layers_by_stage(4, 24), end='')"
    )
    made = Auto(comm=0.3, memory=30.0, slices=[1.0] * 23 + [4.0])
    ours = f"{format_program_csv(made.program(4, 8))} {made.layers_by_stage(4, 24)}"
    surroundings = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=surroundings, capture_output=True, check=True)
    assert done.stdout.decode() == ours


def test_stages_stay_where_they_are_for_other_numbers_of_microbatches() -> None:
    """Placement and layers come from the planned number of microbatches, with any other number too."""
    made = Auto(comm=0.25, microbatches=8, slices=[1.0] * 11 + [3.0])
    sizes = made.layers_by_stage(4, 12)
    for microbatches in (1, 3, 8, 20):
        program = made.program(4, microbatches)
        assert program.stage_to_rank == made.stage_to_rank(4) and find_violations(program) == []
        assert made.layers_by_stage(4, 12) == sizes


def test_stages_a_rank_can_be_asked_for() -> None:
    """With a number of stages per rank, the program has it, and no stage is without a slice."""
    for stages in (1, 2, 3):
        made = Auto(stages_per_rank=stages, slices=[1.0] * 12)
        assert len(made.stage_to_rank(2)) == len(made.layers_by_stage(2, 12)) == 2 * stages


def test_activations_of_slices_are_counted_in_their_own_unit() -> None:
    """
    If the first stage has three times the activations, a rank keeps fewer of its microbatches, by the limit in bytes.
    """
    sizes = [3e9, 1e9, 1e9, 1e9]
    made = Auto(activations=sizes, memory=8e9)
    assert _peak(made.program(2, 8), _sum_per_stage(sizes, made.layers_by_stage(2, 4))) <= 8e9


def test_impossible_settings_are_refused() -> None:
    """Too little memory for one microbatch, too few or unsuitable slices, and zero costs are refused."""
    with pytest.raises(UserError, match=r"memory = 0\.5: a microbatch's activations are 1 on a rank; write more"):
        Auto(memory=0.5).program(4, 8)
    with pytest.raises(
        UserError,
        match=r"3 slices of the model are too few for 4 stages; write 4 or more in every setting that lists slices",
    ):
        Auto(slices=[1.0] * 3).stage_to_rank(4)
    with pytest.raises(UserError, match=r"slices has 4 values, and activations has 5; write as many values in both"):
        Auto(slices=[1.0] * 4, activations=[1.0] * 5).stage_to_rank(4)
    with pytest.raises(UserError, match=r"6 layers are not divisible into 4 slices; write 6 costs in slices"):
        Auto(slices=[1.0] * 4).layers_by_stage(2, 6)
    with pytest.raises(ValueError, match=r"slices: \[1, 2, 3\] has 3 times; write one number, or 4, for F, B, I, W"):
        Auto(slices=[[1, 2, 3]])
    with pytest.raises(ValueError, match="slices: 0 is not above 0"):
        Auto(slices=[1, 0])
    with pytest.raises(ValueError, match="forward: 0 is not above 0"):
        Auto(forward=0)


def test_recomputation_by_block_needs_slices_of_one_layer() -> None:
    """One of several slices is not one of several layers: memory would be counted wrong."""
    made = Auto(slices=[1.0] * 6, trials=5, recompute={"blocks": Recomputation(again=0.9, kept=0.15)})
    assert sum(made.layers_by_stage(2, 6)) == 6
    with pytest.raises(UserError, match="write 12 costs in slices"):
        made.layers_by_stage(2, 12)


@pytest.mark.parametrize("microbatches", [1, 4, 8])
def test_default_memory_has_room_for_pending_weight_gradients(microbatches: int) -> None:
    """Even with more memory waiting for weight gradients than in activations, there is a program within the limit."""
    given: dict[str, Any] = {"slices": [1.0] * 4, "activations": [1.0] * 4, "pending": [1.0, 1.0, 1.0, 9.0]}
    program = Auto(**given, stages_per_rank=2, trials=3).program(2, microbatches)
    peaks = compute_peak_activations(program, given["activations"], given["pending"])
    assert max(peaks) <= 2 * (1.0 + 9.0)


def test_insufficient_memory_counts_pending_weight_gradients() -> None:
    """The error states how much memory is needed."""
    made = Auto(slices=[1.0] * 4, activations=[1.0] * 4, pending=[5.0] * 4, memory=2.0, stages_per_rank=1, trials=5)
    with pytest.raises(UserError, match="10 on a rank"):
        made.program(2, 4)
