"""Schedules from CSV files."""

from pathlib import Path

import pytest

from drawloom.components.pipeline.from_csv import FromCsv
from drawloom.components.pipeline.program.notation import format_program_csv
from drawloom.graph import UserError
from support.schedules import schedule, texts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a CSV file of DualPipeV for 4 ranks and 8 microbatches."""
    (tmp_path / "dual.csv").write_text(format_program_csv(schedule("dual_pipe_v").program(4, 8)))
    return tmp_path / "dual.csv"


def test_a_file_is_a_schedule(path: Path) -> None:
    """The ranks' stages and the program equal the file's."""
    table = FromCsv(path=path)
    assert table.stage_to_rank(4) == (0, 1, 2, 3, 3, 2, 1, 0)
    assert texts(table.program(4, 8).rank_program(2)) == texts(schedule("dual_pipe_v").program(4, 8).rank_program(2))


def test_a_file_of_a_spreadsheet_is_read(path: Path) -> None:
    """It begins with a byte order mark."""
    wanted = FromCsv(path=path).program(4, 8)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert format_program_csv(FromCsv(path=path).program(4, 8)) == format_program_csv(wanted)


def test_other_numbers_of_ranks_or_microbatches_are_refused(path: Path) -> None:
    """Another number of ranks or microbatches is an error naming the file's."""
    with pytest.raises(UserError, match=r"dual\.csv is a schedule for 4 ranks, not 2"):
        FromCsv(path=path).stage_to_rank(2)
    with pytest.raises(UserError, match=r"dual\.csv is a schedule for 8 microbatches, not 16; change the batch"):
        FromCsv(path=path).program(4, 16)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0F0,0B0\n1F0,1B7\n", "not a valid schedule: stage 0 does nothing for microbatch 1"),
        ("0F0,0Q0\n", "not a valid schedule: row 1, column 2: '0Q0' is not an action"),
        ("0F0\n0B0\n", "not a valid schedule: ranks 0 and 1 both work on stage 0"),
        ("0F0,1F0\n2F0\n", "not a valid schedule: its 2 ranks hold different numbers of stages"),
        ("0F0,0F1\n", "has forward passes only, and trains nothing; add backward passes"),
        ("0B0,0F0\n", "not a valid schedule: stage 0 does BF for microbatch 0"),
        ("0F999999999,0B999999999\n", "2 actions are too few for 1000000000 microbatches on 1 stages"),
        (f"0F{10**30},0B0\n", "2 actions are too few for "),
    ],
)
def test_an_invalid_file_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    """A file without a valid schedule is refused with the first violation."""
    (tmp_path / "wrong.csv").write_text(text)
    with pytest.raises(UserError, match=fault):
        FromCsv(path=tmp_path / "wrong.csv").stage_to_rank(2)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """An unreadable file is an error naming it."""
    with pytest.raises(UserError, match=r"nowhere\.csv can't be read: No such file"):
        FromCsv(path=tmp_path / "nowhere.csv").program(1, 1)


@pytest.mark.parametrize(
    "text", [b"root:x:0:0:secret\n", b"secret,0F0\n", b'"secret\n', b"\xff\xfesecret", b"0F0" * 10**6]
)
def test_no_message_quotes_another_file(tmp_path: Path, text: bytes) -> None:
    """A path may lead anywhere: a file that does not begin like a table is refused without its contents."""
    (tmp_path / "other").write_bytes(text)
    with pytest.raises(UserError, match=r"it is not a table of actions such as 3F7$") as caught:
        FromCsv(path=tmp_path / "other").stage_to_rank(2)
    assert "secret" not in str(caught.value) and caught.value.__cause__ is None


def test_a_device_or_a_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    """Nothing of it is held in memory; a link to a table is followed."""
    with pytest.raises(UserError, match="can't be read: it is not a regular file"):
        FromCsv(path=Path("/dev/zero")).stage_to_rank(2)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match=f"can't be read: it has {2**40} bytes"):
        FromCsv(path=tmp_path / "large").stage_to_rank(2)
    (tmp_path / "table").write_text("0F0,0B0\n", "utf-8")
    (tmp_path / "link").symlink_to("table")
    assert FromCsv(path=tmp_path / "link").stage_to_rank(1) == (0,)
