"""Programs from files."""

from pathlib import Path

import pytest

from drawloom.components.pipeline.from_csv import Table
from drawloom.components.pipeline.program.notation import write_csv
from drawloom.graph import UserError
from support.schedules import schedule, texts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table of DualPipeV for 4 ranks and 8 microbatches."""
    (tmp_path / "dual.csv").write_text(write_csv(schedule("dual_pipe_v").program(4, 8)))
    return tmp_path / "dual.csv"


def test_a_file_is_a_schedule(path: Path) -> None:
    """It says how many stages a rank has and whose they are, and gives the program that was written."""
    table = Table(path=path)
    assert table.stages_per_rank == 2
    assert table.stage_to_rank(4) == (0, 1, 2, 3, 3, 2, 1, 0)
    assert texts(table.program(4, 8).line(2)) == texts(schedule("dual_pipe_v").program(4, 8).line(2))


def test_a_file_is_for_its_own_numbers(path: Path) -> None:
    """Asked for other ranks or microbatches it says for which it is."""
    with pytest.raises(UserError, match=r"dual\.csv is a schedule for 4 ranks, not 2"):
        Table(path=path).stage_to_rank(2)
    with pytest.raises(UserError, match=r"dual\.csv is a schedule for 8 microbatches, not 16; the batch says"):
        Table(path=path).program(4, 16)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0F0,0B0\n1F0,1B7\n", "no schedule: stage 0 does nothing for microbatch 1"),
        ("0F0,0Q0\n", "no schedule: row 1, column 2: '0Q0' is no action"),
        ("0F0\n0B0\n", "no schedule: ranks 0 and 1 both work on stage 0"),
        ("0F0,1F0\n2F0\n", "no schedule: its 2 ranks hold different numbers of stages"),
        ("0B0,0F0\n", "no schedule: stage 0 does BF for microbatch 0"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, fault: str) -> None:
    """A file that is no schedule is refused with its first fault."""
    (tmp_path / "wrong.csv").write_text(text)
    with pytest.raises(UserError, match=fault):
        _ = Table(path=tmp_path / "wrong.csv").stages_per_rank


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """So is a file that can't be read."""
    with pytest.raises(UserError, match=r"nowhere\.csv can't be read: No such file"):
        Table(path=tmp_path / "nowhere.csv").program(1, 1)
