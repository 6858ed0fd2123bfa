"""Metrics as JSON lines."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.ports.checkpoint import KnownSteps
from drawloom.components.storage.step_log import StepLog, encode_row, read_step_log
from drawloom.components.trackers.jsonl import JsonlTracker
from drawloom.graph import Every
from drawloom.graph.testing import fake
from support.doubles import SecondRank
from support.folders import Folder


@pytest.fixture
def tracker(tmp_path: Path, one_rank: Any) -> Any:
    """Yield an open tracker in an empty folder."""
    tracker = JsonlTracker(folder=Folder(tmp_path), mesh=one_rank)
    tracker.open()
    yield tracker
    tracker.close()


def _text(path: Path) -> str:
    return (path / "metrics.jsonl").read_text()


def _lines(*rows: dict[str, Any]) -> str:
    """Return rows as they are written."""
    return b"".join(map(encode_row, rows)).decode()


def test_a_line_has_the_exact_bytes_and_is_written_at_once(tracker: JsonlTracker, tmp_path: Path) -> None:
    """`step` is first and the checksum last, values keep their order and type, and no close is needed to read them."""
    tracker.track(1, {"loss": 0.1 + 0.2, "lr": 3e-05, "tokens": 4096, "skipped": True, "validation_loss": None})
    assert _text(tmp_path) == (
        '{"step": 1, "loss": 0.30000000000000004, "lr": 3e-05, "tokens": 4096, "skipped": true, '
        '"validation_loss": null, "format": 2, "crc32": 636598596}\n'
    )


def test_non_finite_numbers_are_null(tracker: JsonlTracker, tmp_path: Path) -> None:
    """NaN and both infinities are null."""
    tracker.track(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    assert _text(tmp_path).startswith('{"step": 1, "a": null, "b": null, "c": null, "format": 2, ')


@given(numbers=st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_floats_round_trip_exactly(one_rank: Any, numbers: list[float]) -> None:
    """Any finite float is read back bit for bit, the sign of zero included."""
    with TemporaryDirectory() as name:
        tracker = JsonlTracker(folder=Folder(Path(name)), mesh=one_rank)
        tracker.open()
        tracker.track(1, {str(index): number for index, number in enumerate(numbers)})
        tracker.close()
        row = json.loads(_text(Path(name)))
    assert [row[str(index)].hex() for index in range(len(numbers))] == [number.hex() for number in numbers]


def test_rewind_removes_later_steps_and_an_incomplete_line(
    tmp_path: Path, one_rank: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The bytes of earlier steps are unchanged, tracking continues after them, and a kill is no damage."""
    head = _lines({"step": 1, "loss": 2.5}, {"step": 2, "loss": None})
    (tmp_path / "metrics.jsonl").write_text(head + _lines({"step": 3, "loss": 1.0}) + '{"step": 4, "lo')
    tracker = JsonlTracker(folder=Folder(tmp_path), mesh=one_rank)
    tracker.open()
    tracker.rewind(2)
    tracker.track(3, {"loss": 1.5})
    tracker.close()
    assert _text(tmp_path) == head + _lines({"step": 3, "loss": 1.5, "format": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert not caplog.records


def test_rewind_keeps_a_complete_line_without_a_newline(tmp_path: Path, one_rank: Any) -> None:
    """A crash between the last brace and the newline loses nothing."""
    (tmp_path / "metrics.jsonl").write_text(_lines({"step": 1}).rstrip("\n"))
    tracker = JsonlTracker(folder=Folder(tmp_path), mesh=one_rank)
    tracker.open()
    tracker.rewind(1)
    tracker.close()
    assert _text(tmp_path) == _lines({"step": 1})


def test_the_checkpoint_wins_over_damaged_lines(
    tmp_path: Path, one_rank: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Values in a changed or unreadable line come from a checkpoint with its step; other lines are counted."""
    known = [(2, {"loss": 2.0}), (3, {"loss": 3.0}), (9, {"loss": 9.0})]
    node = JsonlTracker(
        folder=Folder(tmp_path), mesh=one_rank, checkpoints=Every({"c": fake(KnownSteps, recorded_step_values=known)})
    )
    node.open()
    for step in range(1, 6):
        node.track(step, {"loss": float(step), "tokens": 7})
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[0] = lines[0].replace(b"1.0", b"1.5")
    lines[1] = lines[1].replace(b"2.0", b"2.5")
    lines[2] = bytes(len(lines[2]))
    path.write_bytes(b"".join(lines))
    node.rewind(5)
    node.close()
    rows = [line.row for line in read_step_log(path)[0]]
    assert [row["loss"] for row in rows] == [1.5, 2.0, 3.0, 5.0]
    assert [row.get("tokens") for row in rows] == [7, 7, None, 7]
    [record] = caplog.records
    assert record.getMessage().startswith(f"{path} is damaged: ")
    assert record.getMessage().endswith("(step 1, 2); the values of step 2, 3 are the checkpoint's")


def test_step_0_is_kept_until_the_run_begins_anew(tracker: JsonlTracker, tmp_path: Path) -> None:
    """A measurement before training is a line, removed only by a rewind to before it."""
    tracker.track(0, {"validation_loss": 5.5})
    tracker.track(1, {})
    tracker.rewind(0)
    assert _text(tmp_path) == _lines({"step": 0, "validation_loss": 5.5, "format": 2})
    tracker.rewind(-1)
    assert _text(tmp_path) == ""


def test_rewind_without_changes_keeps_the_file(tracker: JsonlTracker, tmp_path: Path) -> None:
    """The file keeps its inode."""
    tracker.track(1, {})
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    tracker.rewind(1)
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before


@pytest.mark.parametrize("junk", ["\0\0\0\n", "[]\n", '{"loss": 1}\n', '"step"\n', "\xff\n"])
def test_rewind_removes_and_counts_lines_without_a_step(
    tracker: JsonlTracker, tmp_path: Path, junk: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A power cut may leave zeros or other bytes."""
    (tmp_path / "metrics.jsonl").write_bytes(_lines({"step": 1}).encode() + junk.encode("latin-1"))
    tracker.rewind(1)
    assert _text(tmp_path) == _lines({"step": 1})
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/metrics.jsonl is damaged: 1 line is unreadable (line 2)"
    ]


def test_only_rank_0_writes(tmp_path: Path, mesh_of: Callable[..., Any]) -> None:
    """On another rank no file is made by any call."""
    tracker = JsonlTracker(folder=Folder(tmp_path), mesh=mesh_of(world=SecondRank()))
    tracker.open()
    tracker.rewind(0)
    tracker.track(1, {"loss": 1.0})
    tracker.close()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_loses_no_lines(
    tracker: JsonlTracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines are kept until the disk accepts them, also the rest of a partial write; there is one warning."""
    write = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) > 20:
            return write(file, data[:7])
        raise OSError(28, "No space left on device")

    tracker.track(1, {"loss": 1.0})
    monkeypatch.setattr(os, "write", full)
    for step in (2, 3):
        tracker.track(step, {"loss": 1.0})
    monkeypatch.setattr(os, "write", write)
    tracker.track(4, {"loss": 1.0})
    assert [json.loads(line)["step"] for line in _text(tmp_path).splitlines()] == [1, 2, 3, 4]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/metrics.jsonl: No space left on device; lines are kept in memory until the disk accepts them"
    ]


def test_flush_names_the_steps_missing_on_the_disk(tracker: JsonlTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint committed without its rows causes a warning; once the disk accepts them, flush succeeds."""

    def full(_file: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    tracker.track(1, {"loss": 1.0})
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        tracker.track(2, {"loss": 1.0})
        tracker.track(3, {"loss": 1.0})
        with pytest.raises(OSError, match="the rows of steps 2 to 3 are in memory only"):
            tracker.flush()
    tracker.flush()


def test_a_removed_file_is_written_anew(
    tracker: JsonlTracker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No row is lost if somebody removes metrics.jsonl under the run, and one warning reports it."""
    for step in (1, 2, 3, 4):
        tracker.track(step, {"loss": 1.0})
        if step == 2:
            (tmp_path / "metrics.jsonl").unlink()
    assert [json.loads(line)["step"] for line in _text(tmp_path).splitlines()] == [1, 2, 3, 4]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/metrics.jsonl was removed during the run, and is written anew"
    ]


def test_a_file_that_an_editor_replaced_gets_the_later_rows(tracker: JsonlTracker, tmp_path: Path) -> None:
    """Rows go into the file with the name, and not into the replaced one."""
    tracker.track(1, {})
    (tmp_path / "new").write_text("{}\n")
    (tmp_path / "new").rename(tmp_path / "metrics.jsonl")
    tracker.track(2, {})
    assert _text(tmp_path) == "{}\n" + _lines({"step": 2, "format": 2})


@pytest.mark.parametrize(("lines", "message"), [(1, "lacks the rows of steps 2 to 3"), (0, "of steps 1 to 3"), (3, "")])
def test_rewind_to_a_step_without_a_row_warns(
    tracker: JsonlTracker, caplog: pytest.LogCaptureFixture, lines: int, message: str
) -> None:
    """Rows never written by a killed run, or missing in a partial copy, are named when the run resumes."""
    for step in range(1, lines + 1):
        tracker.track(step, {})
    tracker.rewind(3)
    assert message in caplog.text
    assert bool(caplog.records) == bool(message)


def test_buffered_lines_are_limited(tracker: JsonlTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond some megabytes lines are dropped."""
    monkeypatch.setattr("drawloom.components.storage.step_log.BUFFER_SIZE", 100)
    with monkeypatch.context() as patched:
        patched.setattr(StepLog, "_try_to_write_buffer", lambda _: None)
        for step in range(1000):
            tracker.track(step, {"loss": 1.0})
        assert tracker._log is not None and len(tracker._log._buffer) < 200


def test_rewind_works_on_a_full_disk(tracker: JsonlTracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run can start again on a full disk."""
    for step in (1, 2, 3):
        tracker.track(step, {"loss": 1.0})
    monkeypatch.setattr(
        "drawloom.components.storage.appended_file.replace_file", lambda *_: pytest.fail("a file was written")
    )
    tracker.rewind(1)
    monkeypatch.undo()
    tracker.track(2, {"loss": 2.0})
    assert [json.loads(line)["step"] for line in _text(tmp_path).splitlines()] == [1, 2]


def test_flush_syncs_the_written_file(tracker: JsonlTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written file is fsynced."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    tracker.track(1, {"loss": 1.0})
    tracker.flush()
    assert [Path(path).name for path in synced] == ["metrics.jsonl"]
