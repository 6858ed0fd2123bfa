"""Programs in torch's CSV format; torch itself reads them in tests/schedules/test_torch.py."""

import pytest

from drawloom.components.pipeline.program.notation import format_program_csv, parse_program_csv
from support.schedules import NAMES, schedule, texts


@pytest.mark.parametrize("name", NAMES)
def test_csv_survives_a_round_trip(name: str) -> None:
    """A program written as CSV and read again is the same."""
    program = schedule(name).program(4, 9)
    back = parse_program_csv(format_program_csv(program))
    assert [texts(back.rank_program(rank)) for rank in range(4)] == [
        texts(program.rank_program(rank)) for rank in range(4)
    ]


def test_overlaps_have_torchs_notation() -> None:
    """An overlap is written as its parts in parentheses, followed by OVERLAP_F_B."""
    assert "(3F5;4B1)OVERLAP_F_B" in format_program_csv(schedule("dual_pipe_v").program(4, 8))


def test_cells_without_compute_are_skipped() -> None:
    """Empty cells and rows, messages, FSDP actions and waits are not part of a program."""
    program = parse_program_csv(
        "0UNSHARD,0F0,,0SEND_F0, 0RECV_B0 ,0B0,0REDUCE_GRAD,0RESHARD,0WAIT_REDUCE_GRAD\n\n"
        ",1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0\n"
    )
    assert [texts(program.rank_program(rank)) for rank in range(2)] == [["0F0", "0B0"], ["1F0", "1B0"]]


def test_errors_name_the_cell() -> None:
    """An error names the row and the column."""
    with pytest.raises(ValueError, match="row 2, column 3: '1X0' is not an action"):
        parse_program_csv("0F0,0B0\n1F0,1B0,1X0\n")
