"""Text for a terminal."""

import io
import re
import sys
from pathlib import Path

import pytest

from drawloom.graph import UserError
from drawloom.graph.cli.terminal import escape_control_characters, format_table, print_escaped_text

ROOT = Path(__file__).parents[3]


class FailingStream(io.StringIO):
    """A stream with a full disk or without a reader."""

    def __init__(self, fault: OSError) -> None:
        super().__init__()
        self.fault = fault

    def write(self, _text: str) -> int:
        """Fail."""
        raise self.fault


def test_control_characters_are_escaped_and_other_text_is_kept() -> None:
    """C0, DEL, C1 and surrogates are escaped, while tabs, line ends and other text stay."""
    commands = [*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), "\ud83d", "\udc80"]
    left = [letter for letter in commands if escape_control_characters(letter) == letter]
    assert left == ["\t", "\n"]
    assert all(escape_control_characters(letter).isascii() for letter in commands)
    assert escape_control_characters("\x1b]0;title\x07 \x9b2J \rover") == "\\x1b]0;title\\x07 \\x9b2J \\rover"
    assert escape_control_characters("é 字 😀 a\r\nb\tc\\x1b") == "é 字 😀 a\r\nb\tc\\x1b"


def test_a_full_disk_under_standard_output_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """`drawloom check > /dev/full` ends with a user error."""
    monkeypatch.setattr(sys, "stdout", FailingStream(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="standard output can't be written: No space left on device"):
        print_escaped_text("text")


def test_a_closed_pipe_is_not_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """`drawloom draw | head -1` raises BrokenPipeError, which is not a failure."""
    monkeypatch.setattr(sys, "stdout", FailingStream(BrokenPipeError(32, "Broken pipe")))
    with pytest.raises(BrokenPipeError):
        print_escaped_text("text")


def test_a_failing_standard_error_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that standard error can't take is dropped, so that the exit code stays."""
    monkeypatch.setattr(sys, "stderr", FailingStream(OSError(28, "No space left on device")))
    print_escaped_text("text", "stderr")


def test_nothing_is_printed_without_the_filter() -> None:
    """Only `print_escaped_text` calls print, so that all text is escaped."""
    files = [path for name in ("graph", "components") for path in (ROOT / name).rglob("*.py")]
    printing = [path for path in files if re.search(r"(?<![\w.])print\(", path.read_text("utf-8"))]
    assert printing == [ROOT / "graph/cli/terminal.py"]


def test_columns_are_aligned() -> None:
    """The columns in `left` are aligned left, the others right, without spaces at the end."""
    rows = [("a", "bb", "c"), ("aaa", "b", "ccc")]
    assert format_table(rows) == "a    bb    c\naaa   b  ccc"
    assert format_table(rows, left=(0, 2)) == "a    bb  c\naaa   b  ccc"
