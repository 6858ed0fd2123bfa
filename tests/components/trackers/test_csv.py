"""Metrics in a table."""

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.trackers.csv import CsvTracker
from drawloom.components.trackers.jsonl import JsonlTracker
from drawloom.components.trackers.tensorboard import TensorBoardTracker
from drawloom.graph import UserError
from support.folders import Folder


@pytest.fixture
def make(tmp_path: Path, one_rank: Any) -> Callable[..., Any]:
    """Return a function for opening a tracker, as in a run's process."""

    def make(kind: Any = CsvTracker) -> Any:
        tracker = kind(folder=Folder(tmp_path), mesh=one_rank)
        tracker.open()
        return tracker

    return make


def table(folder: Path) -> list[dict[str, str]]:
    """Return the lines, by the names in the first."""
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_each_step_has_a_line_with_its_numbers(make: Any, tmp_path: Path) -> None:
    """Numbers come back exactly; a later metric has a column, and a value that is not finite an empty field."""
    tracker = make()
    tracker.rewind(0)
    tracker.track(1, {"loss": 0.1 + 0.2, "tokens": 7, "grad_norm": math.nan})
    tracker.track(2, {"loss": 1e-300, 'a,"b"': 2.0, "validation_loss": None, "skipped": True})
    tracker.close()
    first = {"step": "1", "loss": repr(0.1 + 0.2), "tokens": "7.0", 'a,"b"': "", "skipped": ""}
    assert table(tmp_path) == [
        first,
        {"step": "2", "loss": "1e-300", "tokens": "", 'a,"b"': "2.0", "skipped": "1.0"},
    ]


def test_a_resumed_run_has_one_line_per_step(make: Any, tmp_path: Path) -> None:
    """Killed within the line of step 6 and resumed after step 3, the file equals an uninterrupted run's."""
    first = make()
    first.rewind(0)
    for step in range(1, 7):
        first.track(step, {"loss": float(step)})
    first.close()
    path = tmp_path / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-3])
    second = make()
    second.rewind(3)
    for step in (4, 5):
        second.track(step, {"loss": -float(step), "lr": 0.1})
    second.rewind(4)  # the run goes back
    second.track(5, {"loss": 9.0})
    second.close()
    assert [(row["step"], row["loss"], row["lr"]) for row in table(tmp_path)] == [
        ("1", "1.0", ""),
        ("2", "2.0", ""),
        ("3", "3.0", ""),
        ("4", "-4.0", "0.1"),
        ("5", "9.0", ""),
    ]


def test_trackers_in_one_folder_leave_one_another_alone(make: Any, tmp_path: Path) -> None:
    """Several at once have all steps each."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = [make(kind) for kind in (CsvTracker, JsonlTracker, TensorBoardTracker)]
    for tracker in trackers:
        tracker.rewind(0)
    for step in (1, 2, 3):
        for tracker in trackers:
            tracker.track(step, {"loss": float(step)})
    for tracker in trackers:
        tracker.close()
    assert [row["loss"] for row in table(tmp_path)] == ["1.0", "2.0", "3.0"]
    assert len((tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()) == 3
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("loss")] == [1.0, 2.0, 3.0]


def test_a_link_is_refused(make: Any, tmp_path: Path) -> None:
    """Nothing is written through a link in a received run folder."""
    (tmp_path / "metrics.csv").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError):
        make()
    assert not (tmp_path / "elsewhere").exists()


def test_a_removed_table_is_written_anew(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No line is lost, nor the header with the names, and one warning reports it."""
    tracker = make()
    tracker.rewind(0)
    tracker.track(1, {"loss": 1.0})
    assert tracker._background.run_and_wait(lambda: (tmp_path / "metrics.csv").unlink(), 60)
    tracker.track(2, {"loss": 2.0})
    tracker.close()
    assert [(row["step"], row["loss"]) for row in table(tmp_path)] == [("1", "1.0"), ("2", "2.0")]
    assert "metrics.csv was removed during the run, and is written anew" in caplog.text


def test_damaged_lines_of_a_table_are_counted(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resume removes lines with other bytes and misordered lines, and logs their number."""
    tracker = make()
    tracker.rewind(0)
    for step in (1, 2, 3, 4):
        tracker.track(step, {"loss": float(step)})
    tracker.close()
    path = tmp_path / "metrics.csv"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1], bytes(5) + b"\n", lines[3], lines[2], b"4,4.\xff\n"]))
    again = make()
    again.rewind(4)
    again.close()
    assert [row["step"] for row in table(tmp_path)] == ["1", "3"]
    assert "3 of its lines can't be read" in caplog.text
