"""The timing of actions."""

import numpy as np
import pytest

from drawloom.components.pipeline.program.partition import BatchedTiming
from drawloom.components.pipeline.program.timing import Costs, CostTable, DeadlockError, compute_timing
from support.schedules import parse_program, schedule


def test_actions_wait_for_their_inputs() -> None:
    """F needs the previous stage's F, a backward the next stage's, W nothing; messages take time."""
    program = parse_program("0: 0F0 0F1 0I0 0W0 0B1\n1: 1F0 1B0 1F1 1I1 1W1\n")
    timing = compute_timing(program, Costs(1, 2, 3, comm=0.5))
    assert timing.start.tolist() == [0, 1, 8, 10, 13, 1.5, 2.5, 7.5, 8.5, 10.5]
    assert timing.end.tolist() == [1, 2, 10, 13, 18, 2.5, 7.5, 8.5, 10.5, 13.5]
    assert timing.makespan == 18


def test_messages_to_the_same_rank_take_no_time() -> None:
    """Only messages between ranks have a delay."""
    timing = compute_timing(parse_program("0: 0F0 1F0 1B0 0B0\n"), Costs(comm=9))
    assert timing.makespan == 6


def test_an_action_is_in_a_later_wave_than_its_inputs() -> None:
    """An action of cost 0 is still in a later wave than all its inputs."""
    timing = compute_timing(parse_program("0: 0F0 0I0 0W0\n1: 1F0 1I0 1W0\n"), Costs(0, 0, 0))
    assert timing.wave.tolist() == [0, 3, 4, 1, 2, 3]


def test_a_deadlock_names_the_waiting_actions() -> None:
    """The error lists the actions ranks wait for."""
    with pytest.raises(DeadlockError, match="rank 0 waits to do 0B0, rank 1 waits to do 1B0"):
        compute_timing(parse_program("0: 0B0 0F0\n1: 1B0 1F0\n"), Costs())


def test_a_part_of_a_program_waits_for_nothing_of_other_ranks() -> None:
    """Without rank 1's actions, rank 0 starts a backward when it is free and the message has had its time."""
    whole = parse_program("0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n")
    part = whole.select_actions(whole.rank_by_action == 0)
    timing = compute_timing(part, Costs(comm=2.5))
    assert (timing.start.tolist(), timing.end.tolist()) == ([0.0, 1.0, 2.5, 4.5], [1.0, 2.0, 4.5, 6.5])
    assert timing.wave.tolist() == [0, 1, 2, 3]


def test_a_part_that_deadlocks_by_itself_is_refused() -> None:
    """A rank whose own stages wait for one another has no timing, whatever other ranks do."""
    whole = parse_program("0: 0F0 2B0 2F0 0B0\n1: 1F0 1B0\n")
    with pytest.raises(DeadlockError, match="rank 0 waits to do 2B0"):
        compute_timing(whole.select_actions(whole.rank_by_action == 0), Costs())


def test_stages_share_the_costs_of_a_rank_and_not_messages() -> None:
    """A message between two of a rank's four stages is as large as one between whole ranks."""
    stage_costs = Costs(1, 2, 4, comm=0.5, unshard=8, reduce=16).divide_by_stages(4)
    assert [stage_costs.get_duration(op) for op in ("F", "I", "W", "B")] == [0.25, 0.5, 1, 1.5]
    assert (stage_costs.comm, stage_costs.unshard, stage_costs.reduce) == (0.5, 2, 4)


def test_a_table_has_costs_of_each_stage() -> None:
    """A table has costs by op and stage; other stages share the costs of the old stages they come from."""
    table = CostTable(comm=1.0, lengths=np.array([[1.0, 4, 2, 2], [3, 8, 4, 4]]))
    program = parse_program("0: 0F0 0B0\n1: 1F0 1I0 1W0\n")
    assert table.get_durations(program).tolist() == [1, 4, 3, 4, 4]
    assert (table.get_duration("W", 1), table.get_duration("SEND_F", 1)) == (4, 1)
    assert table.resample_to_sizes([1, 1, 1, 1]).lengths[:, 0].tolist() == [0.5, 0.5, 1.5, 1.5]
    assert table.resample_to_sizes([2]).lengths.tolist() == [[4, 12, 6, 6]]
    assert compute_timing(program, table).makespan == 1 + 1 + 3 + 4 + 1 + 4


@pytest.mark.parametrize("name", ["dual_pipe_v", "zero_bubble_1p", "gpipe", "v_min"])
def test_many_costs_at_once_equal_single_ones(name: str) -> None:
    """The makespans equal a single table's."""
    program, chance = schedule(name).program(4, 6), np.random.default_rng(0)
    lengths = chance.uniform(0.1, 2, (5, program.stages, 4))
    makespans = BatchedTiming(program, 0.3).compute_makespans(lengths)
    assert makespans.tolist() == [
        compute_timing(program, CostTable(comm=0.3, lengths=one_lengths)).makespan for one_lengths in lengths
    ]
