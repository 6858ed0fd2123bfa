"""Lines by step, which a run appends to a file."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.storage.step_log import StepLog, encode_row, parse_step_lines, read_step_log

ROWS = [{"step": step, "loss": 1 / step, "name": "é", "none": None} for step in range(1, 6)]
CONTENT = b"".join(map(encode_row, ROWS))


def test_written_rows_are_read_back() -> None:
    """Rows come back as they were, in order, and nothing is damaged."""
    lines, damage = parse_step_lines(CONTENT)
    assert [line.row for line in lines] == ROWS and not str(damage)


@given(offset=st.integers(0, len(CONTENT) - 2), bit=st.integers(0, 7))
def test_every_flipped_bit_is_reported_and_costs_one_or_two_lines(offset: int, bit: int) -> None:
    """A flip anywhere is damage; the rows of other lines are as they were. One in a line's end joins two lines."""
    changed = bytearray(CONTENT)
    changed[offset] ^= 1 << bit
    lines, damage = parse_step_lines(bytes(changed))
    assert str(damage)
    intact = [line.row for line in lines if not line.has_changed]
    assert all(row in ROWS for row in intact) and len(intact) >= 3


@given(start=st.integers(0, len(CONTENT) - 2), length=st.integers(1, 300))
def test_a_zeroed_range_is_reported(start: int, length: int) -> None:
    """Zeros anywhere are damage, unless they are a torn last line; no row is made of them."""
    end = min(start + length, len(CONTENT))
    lines, damage = parse_step_lines(CONTENT[:start] + bytes(end - start) + CONTENT[end:])
    assert all(line.row in ROWS for line in lines if not line.has_changed)
    assert str(damage) or end == len(CONTENT)


@pytest.mark.parametrize(
    ("order", "kept", "told"),
    [
        ([1, 3, 2, 4], [1, 3, 4], "1 line is out of order (line 3)"),
        ([1, 1, 2], [1, 2], "1 line is out of order (line 2)"),
        ([3, 1, 2, 4], [3, 4], "2 lines are out of order (line 2, 3)"),
    ],
)
def test_lines_out_of_order_are_counted(order: list[int], kept: list[int], told: str) -> None:
    """Each step has one line, and steps rise."""
    lines, damage = parse_step_lines(b"".join(encode_row(ROWS[step - 1]) for step in order))
    assert [line.step for line in lines] == kept and str(damage) == told


def test_a_line_of_another_step_than_was_written_removes_no_other(tmp_path: Path) -> None:
    """A changed line with a later step is out of order, and the lines after it are not."""
    path = tmp_path / "log"
    path.write_bytes(CONTENT.replace(b'"step": 2', b'"step": 7'))
    lines, damage = read_step_log(path)
    assert [line.step for line in lines] == [1, 3, 4, 5]
    assert str(damage) == "1 line is out of order (line 2)"


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    """A run without any output is not damaged."""
    assert read_step_log(tmp_path / "none")[0] == []


def test_rewind_returns_the_last_remaining_step(tmp_path: Path) -> None:
    """Later lines are removed, and appending to a cut file works."""
    (tmp_path / "log").write_bytes(CONTENT)
    log = StepLog.open(tmp_path / "log")
    assert log.rewind_and_get_last_step(3) == 3 and log.rewind_and_get_last_step(9) == 3
    log.append({"step": 4})
    log.close()
    assert [line.step for line in read_step_log(tmp_path / "log")[0]] == [1, 2, 3, 4]
