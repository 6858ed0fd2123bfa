"""Properties of every schedule, for any number of ranks, stages and microbatches."""

from collections import Counter
from itertools import pairwise, product
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.pipeline.from_csv import find_violations
from drawloom.components.pipeline.program.builders import build_forward_only_program
from drawloom.components.pipeline.program.lowering import lower_to_rank_program
from drawloom.components.pipeline.program.timing import Costs
from drawloom.components.pipeline.simulation.simulator import Channels, simulate, simulate_events
from drawloom.components.ports.pipeline import Schedule
from drawloom.components.ports.program import Program, RankProgram
from support.schedules import NAMES, counts, ends, parts, rendezvous, variants

RANKS = (1, 2, 3, 4, 5, 8)
COSTS = st.floats(0.1, 3.0)


@st.composite
def programs(draw: st.DrawFn, most_ranks: int = 5) -> Program:
    """Draw a program of any schedule."""
    schedule: Schedule = draw(st.sampled_from([v for name in NAMES for v in variants(name)]))
    return schedule.program(draw(st.integers(1, most_ranks)), draw(st.integers(1, 12)))


def lower_all(program: Program) -> list[RankProgram]:
    """Return the lowered programs of all ranks."""
    return [lower_to_rank_program(program, rank) for rank in range(program.ranks)]


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_runs_every_microbatch_once_and_in_order(name: str) -> None:
    """Every stage runs one forward and one backward per microbatch on its rank, without a deadlock."""
    for variant, ranks in product(variants(name), RANKS):
        for microbatches in counts(ranks):
            program = variant.program(ranks, microbatches)
            assert program.stage_to_rank == variant.stage_to_rank(ranks)
            assert Counter(program.stage_to_rank) == dict.fromkeys(range(ranks), program.stages // ranks)
            assert program.microbatches == microbatches
            assert find_violations(program) == []
            work = Counter(
                (a.stage, a.microbatch, str(a.op)) for r in range(ranks) for a in parts(program.rank_program(r))
            )
            for stage, microbatch in product(range(program.stages), range(microbatches)):
                done = {kind: work.pop((stage, microbatch, kind), 0) for kind in "FBIW"}
                assert done in ({"F": 1, "B": 1, "I": 0, "W": 0}, {"F": 1, "B": 0, "I": 1, "W": 1})
            assert not work


def test_evaluation_runs_only_forwards() -> None:
    """With the stages of any schedule, an evaluation runs one forward per stage and microbatch, and no other op."""
    for variant, ranks in product(variants("looped_bfs"), RANKS):
        program = build_forward_only_program(variant.stage_to_rank(ranks), 7)
        assert [a.op for r in range(ranks) for a in parts(program.rank_program(r))] == ["F"] * program.stages * 7
        assert simulate(program, Costs()).peak_activations == [0] * ranks


@given(ranks=st.integers(1, 5), data=st.data(), microbatches=st.integers(1, 9))
def test_evaluation_needs_no_order_of_stages(ranks: int, data: st.DataObject, microbatches: int) -> None:
    """For any assignment of stages to ranks, forward programs are valid and finish with blocking sends."""
    stages = data.draw(st.permutations([*range(ranks)] * data.draw(st.integers(1, 3))))
    program = build_forward_only_program(stages, microbatches)
    assert find_violations(program) == []
    rendezvous(lower_all(program))


@given(program=programs(), forward=COSTS, inputs=COSTS, weights=COSTS, message=st.floats(0, 2))
def test_times_equal_a_fixed_point_iteration(
    program: Program, forward: float, inputs: float, weights: float, message: float
) -> None:
    """For any costs there is no deadlock, and end times equal a plain fixed-point iteration."""
    costs = Costs(forward, inputs, weights, comm=message)
    run, end_times = simulate(program, costs), ends(program, costs.get_duration, message)
    for rank in range(program.ranks):
        for bar in run.iterate_bars(rank):
            action = bar.action.stage, bar.action.op, bar.action.microbatch
            assert bar.end == pytest.approx(end_times[action], rel=1e-9)


@given(program=programs(), message=st.floats(0, 2))
def test_slower_messages_never_make_a_step_shorter(program: Program, message: float) -> None:
    """The makespan does not fall when messages take longer."""
    assert simulate(program, Costs(comm=message)).makespan <= simulate(program, Costs(comm=message + 1)).makespan


@given(program=programs(), message=st.floats(0, 2), forward=COSTS)
def test_blocking_sends_do_not_deadlock(program: Program, message: float, forward: float) -> None:
    """Programs finish if sends block until their receive, and every send meets its own receive."""
    costs = Costs(forward, comm=message)
    rendezvous([lower_to_rank_program(program, rank, costs) for rank in range(program.ranks)])


@given(program=programs())
def test_messages_are_received_in_the_order_of_their_sends(program: Program) -> None:
    """Between two ranks, receives are in the order of sends, and every hop is sent and received once."""
    lines = [parts(line) for line in lower_all(program)]
    for here, there in product(range(program.ranks), repeat=2):
        sent = [a for a in lines[here] if a.peer == there and a.op.startswith("SEND")]
        received = [a for a in lines[there] if a.peer == here and a.op.startswith("RECV")]
        step = {"F": 1, "B": -1}
        assert [(a.stage + step[a.op[-1]], a.op[-1], a.microbatch) for a in sent] == [
            (a.stage, a.op[-1], a.microbatch) for a in received
        ]
    hops = sum(one != other for one, other in pairwise(program.stage_to_rank)) * program.microbatches
    ways = 2 if any(a.op == "B" or a.op == "I" for line in lines for a in line) else 1
    assert sum(a.op.startswith("SEND") for line in lines for a in line) == hops * ways


@given(program=programs())
def test_sends_follow_producers_and_receives_precede_consumers(program: Program) -> None:
    """On every rank a send follows its producer, and a receive precedes its consumer."""
    for line in map(parts, lower_all(program)):
        index = {(a.stage, str(a.op), a.microbatch): number for number, a in enumerate(line)}
        for (stage, work, microbatch), number in index.items():
            works = ("F",) if work.endswith("F") else ("B", "I")
            partner = next(index[stage, w, microbatch] for w in works if (stage, w, microbatch) in index)
            if work.startswith("SEND"):
                assert partner < number
            if work.startswith("RECV"):
                assert number < partner


@given(program=programs(most_ranks=4), channels=st.sampled_from(get_args(Channels)), message=st.floats(0, 1))
def test_contention_does_not_deadlock(program: Program, channels: Channels, message: float) -> None:
    """Programs finish with any sharing of channels, no earlier than without contention."""
    costs = Costs(comm=message)
    events = simulate_events(
        [lower_to_rank_program(program, rank, costs) for rank in range(program.ranks)], costs, channels
    )
    free = simulate(program, costs).makespan
    assert max(event.end for event in events.values()) >= free - 1e-9


@given(program=programs())
def test_lowering_keeps_the_compute_actions_and_their_order(program: Program) -> None:
    """Without messages, a lowered program is the rank's program, except that I and a following W may be B."""
    for rank, line in enumerate(lower_all(program)):
        lowered = [item for action in parts(line) if action.peer is None for item in _as_parts(action.op, action)]
        plain = [item for action in parts(program.rank_program(rank)) for item in _as_parts(action.op, action)]
        assert lowered == plain


def _as_parts(work: str, action: object) -> list[tuple[int, str, int]]:
    kinds = ("I", "W") if work == "B" else (work,)
    return [(action.stage, kind, action.microbatch) for kind in kinds]  # type: ignore[attr-defined]
