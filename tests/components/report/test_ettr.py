"""The effective training time of runs."""

import json
from collections.abc import Mapping
from pathlib import Path

from drawloom.components.report.ettr import Ettr, compute_ettr
from drawloom.components.report.events import read_log
from drawloom.components.report.metrics import read_metrics
from drawloom.components.report.run_record import read_run_rows


def ettr_of(folder: Path) -> Ettr | None:
    """Return a run folder's ETTR."""
    return compute_ettr(read_log(folder), read_metrics(folder))


def write(
    folder: Path, steps: int, log: list[tuple[int, str]], recoveries: Mapping[int, Mapping[str, float]] | None = None
) -> Path:
    """Write a run folder with 2-second steps, messages at some seconds, and recoveries' seconds by step and part."""
    (folder / "log").mkdir()
    rows: list[dict[str, float]] = [
        {"step": step, "tokens": 10 * step, "tokens_per_second": 5.0} for step in range(1, steps + 1)
    ]
    for step, parts in (recoveries or {}).items():
        rows[step - 1] |= {f"recovery/{part}": seconds for part, seconds in parts.items()}
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lines = [
        f"2026-01-01 00:{second // 60:02d}:{second % 60:02d},500 INFO drawloom.run: {text}" for second, text in log
    ]
    (folder / "log/rank-0.log").write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_lost_steps_starts_and_stops_do_not_count_as_learned(tmp_path: Path) -> None:
    """A run killed after 8 of 10 steps and resumed from the 5th has learned for 20 s of 100, not for 26."""
    header = "run     mine, in runs/mine"
    log = [(3, header), (10, "step 1/10  loss 5"), (40, "step 8/10  loss 4"), (80, header)]
    log += [(82, "resuming after step 5"), (90, "step 6/10  loss 4"), (103, "trained steps 6 to 10 in 0:00:23")]
    ettr = ettr_of(write(tmp_path, 10, log))
    assert ettr is not None
    assert (round(ettr.productive_seconds, 6), ettr.wall_seconds, ettr.lost_steps, ettr.processes) == (20, 100, 3, 2)
    words = "20.0% in steps that count: 0:00:20 of 0:01:40 since the start, 2 processes, 3 steps lost and done again"
    assert str(ettr) == words


def test_survived_losses_are_added_up_by_part(tmp_path: Path) -> None:
    """Two steps were repeated in memory; their seconds are in the table of runs, too."""
    log = [(3, "run     mine, in runs/mine"), (53, "trained steps 1 to 10 in 0:00:50")]
    write(tmp_path, 10, log, {3: {"repeat": 0.5, "detect": 1.0}, 7: {"repeat": 0.25, "detect": 2.0}})
    ettr = ettr_of(tmp_path)
    assert ettr is not None and ettr.recoveries == 2
    assert ettr.recovery_seconds == {"detect": 3.0, "repeat": 0.75}
    assert str(ettr).endswith(", 2 steps repeated in memory within 3.75 s (detect 3.00 s, repeat 0.75 s)")
    [row] = read_run_rows(tmp_path)
    assert row.ettr == ettr.productive_time_fraction == 0.4
    assert row.recovery_seconds == ettr.recovery_seconds


def test_a_run_without_times_has_none(tmp_path: Path) -> None:
    """Without a log, and without a step."""
    assert ettr_of(tmp_path) is None
    assert ettr_of(write(tmp_path, 0, [(1, "run     mine"), (2, "x")])) is None
