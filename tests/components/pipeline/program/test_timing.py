"""When actions start and end."""

import pytest

from drawloom.components.pipeline.program.costs import Costs
from drawloom.components.pipeline.program.notation import read_program
from drawloom.components.pipeline.program.timing import Deadlock, time


def test_work_waits_for_what_it_needs() -> None:
    """A forward needs the one before, a backward that behind, weights nothing but their turn; messages take time."""
    program = read_program("0: 0F0 0F1 0I0 0W0 0B1\n1: 1F0 1B0 1F1 1I1 1W1\n")
    timing = time(program, Costs(1, 2, 3, comm=0.5))
    assert timing.start.tolist() == [0, 1, 8, 10, 13, 1.5, 2.5, 7.5, 8.5, 10.5]
    assert timing.end.tolist() == [1, 2, 10, 13, 18, 2.5, 7.5, 8.5, 10.5, 13.5]
    assert timing.makespan == 18


def test_a_hop_to_the_same_rank_takes_no_time() -> None:
    """Only messages between ranks are on their way."""
    timing = time(read_program("0: 0F0 1F0 1B0 0B0\n"), Costs(comm=9))
    assert timing.makespan == 6


def test_later_sweeps_come_after_earlier_ones() -> None:
    """What costs nothing still comes in a later sweep than all it needs."""
    timing = time(read_program("0: 0F0 0I0 0W0\n1: 1F0 1I0 1W0\n"), Costs(0, 0, 0))
    assert timing.wave.tolist() == [0, 3, 4, 1, 2, 3]


def test_what_is_stuck_is_named() -> None:
    """If no rank can go on, the error says what each waits to do."""
    with pytest.raises(Deadlock, match="rank 0 waits to do 0B0, rank 1 waits to do 1B0"):
        time(read_program("0: 0B0 0F0\n1: 1B0 1F0\n"), Costs())
