"""The time of a step."""

import pytest

from drawloom.components.planning.stage_costs import PassCost, StageCosts, Work
from drawloom.components.planning.step_time import (
    CONTENTION,
    CONTENTION_OF_COPIES,
    ReplicaTimes,
    StepTime,
    build_cost_table,
    estimate_step_time,
)
from drawloom.components.ports.program import Action, Program

PROGRAM = Program.from_rank_programs(
    [
        [Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0), Action(0, "B", 1)],
        [Action(1, "F", 0), Action(1, "B", 0), Action(1, "F", 1), Action(1, "B", 1)],
    ]
)
COSTS = {
    0: StageCosts({"F": PassCost(1.0), "B": PassCost(2.0, comm_seconds=0.5)}, 0),
    1: StageCosts({"F": PassCost(3.0, host=1.0), "B": PassCost(4.0, host=5.0)}, 0),
}
NOTHING = ReplicaTimes({}, {}, Work(), Work(), Work())


def test_a_step_takes_the_longest_path_through_both_ranks() -> None:
    """The second rank is busy for 14 s; it waits for the first forward and the last backward."""
    planned_time = estimate_step_time(
        PROGRAM,
        build_cost_table(COSTS, [NOTHING] * 2, message_seconds=0.5, host_link_bandwidth=1.0),
        COSTS,
        [NOTHING] * 2,
    )
    assert (planned_time.compute, planned_time.sending) == (14.0, 0.0)
    assert planned_time.bubble == pytest.approx(1 + 0.5 + 0.5 + 2)


def test_passes_take_the_seconds_of_whichever_is_slower_over_all_of_them() -> None:
    """
    A host slower in one pass, but not in all, has issued it before the device gets there; a host slower in all sets the
    pace, and weights are updated while the device would wait for it.
    """
    program = Program.from_rank_programs([[Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)]])
    update = [ReplicaTimes({}, {}, Work(), Work(), Work(planned=1.5))]

    def time_with_update(forward: float, backward: float) -> StepTime:
        costs = {0: StageCosts({"F": PassCost(1.0, host=forward), "B": PassCost(4.0, host=backward)}, 0)}
        return estimate_step_time(
            program, build_cost_table(costs, update, message_seconds=0.0, host_link_bandwidth=1.0), costs, update
        )

    assert (time_with_update(3.0, 1.0).compute, time_with_update(3.0, 1.0).seconds) == (10.0, 11.5)
    assert (time_with_update(3.0, 2.5).compute, time_with_update(3.0, 2.5).seconds) == (11.0, 11.5)
    assert (time_with_update(3.0, 3.0).compute, time_with_update(3.0, 3.0).seconds) == (12.0, 12.0)


def test_passes_hide_exchanges_up_to_their_own_length() -> None:
    """
    A pass takes at least as long as its gathers and sums, and longer beside them; sums once a step run beside the last
    backward pass.
    """
    exchanges = [
        ReplicaTimes({0: Work(planned=1.5)}, {}, Work(), Work(planned=3.0), Work(planned=0.25)),
        ReplicaTimes(
            gathered_by_pass={1: Work(planned=2.5)},
            reduced_by_pass={1: Work(planned=22.0)},
            gathered_once=Work(planned=2.0),
            reduced_once=Work(planned=30.0),
            update=Work(planned=0.5),
        ),
    ]
    planned_time = estimate_step_time(
        PROGRAM, build_cost_table(COSTS, exchanges, message_seconds=0.0, host_link_bandwidth=1.0), COSTS, exchanges
    )
    assert planned_time.compute == pytest.approx(2 * (3.0 + CONTENTION * 2.5) + 2 * 24.5)
    assert (planned_time.gather, planned_time.sync, planned_time.update) == (2.0, max(CONTENTION * 30.0, 5.5), 0.5)
    others = planned_time.compute + planned_time.bubble
    assert planned_time.seconds == pytest.approx(others + 2.0 + CONTENTION * 30.0 + 0.5)


def test_passes_lose_less_beside_copies() -> None:
    """A step beside copies takes as much less as their contention is smaller, for exchanges that passes hide."""
    seconds = []
    for contention in (CONTENTION, CONTENTION_OF_COPIES):
        exchanges = [ReplicaTimes({0: Work(planned=0.5)}, {}, Work(), Work(planned=1.0), Work(), contention), NOTHING]
        table = build_cost_table(COSTS, exchanges, message_seconds=0.0, host_link_bandwidth=1.0)
        seconds.append(estimate_step_time(PROGRAM, table, COSTS, exchanges))
    less = CONTENTION - CONTENTION_OF_COPIES
    assert table.lengths[0, 0] == 1.0 + CONTENTION_OF_COPIES * 0.5
    assert seconds[0].sync - seconds[1].sync == pytest.approx(less)


def test_forward_passes_of_a_reference_come_before() -> None:
    """Through both ranks, with messages; they are a part of the step."""
    table = build_cost_table(COSTS, [NOTHING] * 2, message_seconds=0.5, host_link_bandwidth=1.0)
    alone, both = (estimate_step_time(PROGRAM, table, COSTS, [NOTHING] * 2, reference) for reference in (False, True))
    forward = table.lengths[:, 0]
    assert both.reference == pytest.approx(forward[0] + 0.5 + 2 * forward[1])
    assert both.seconds == pytest.approx(alone.seconds + both.reference)
    assert alone.reference == 0
