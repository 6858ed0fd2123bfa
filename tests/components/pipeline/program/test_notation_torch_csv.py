"""Programs in torch's CSV format; torch itself reads them in tests/schedules/test_torch.py."""

import pytest

from drawloom.components.pipeline.program.notation import read_csv, write_csv
from support.schedules import NAMES, schedule, texts


@pytest.mark.parametrize("name", NAMES)
def test_programs_come_back_from_csv(name: str) -> None:
    """What was written is read."""
    program = schedule(name).program(4, 9)
    back = read_csv(write_csv(program))
    assert [texts(back.line(rank)) for rank in range(4)] == [texts(program.line(rank)) for rank in range(4)]


def test_overlaps_are_written_as_torch_writes_them() -> None:
    """The parts in brackets, the kind behind them."""
    assert "(3F5;4B1)OVERLAP_F_B" in write_csv(schedule("dual_pipe_v").program(4, 8))


def test_what_is_no_work_is_passed_over() -> None:
    """Empty cells and rows, messages and what concerns sharded weights are no part of a program."""
    program = read_csv("0UNSHARD,0F0,,0SEND_F0, 0RECV_B0 ,0B0,0REDUCE_GRAD,0RESHARD\n\n,1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert [texts(program.line(rank)) for rank in range(2)] == [["0F0", "0B0"], ["1F0", "1B0"]]


def test_the_cell_of_a_fault_is_named() -> None:
    """An error says in which row and column it is."""
    with pytest.raises(ValueError, match="row 2, column 3: '1X0' is no action"):
        read_csv("0F0,0B0\n1F0,1B0,1X0\n")
