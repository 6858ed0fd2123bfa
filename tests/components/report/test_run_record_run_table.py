"""The table of runs below a folder."""

import json
import os
import socket
from pathlib import Path

import pytest

from drawloom.components.report.run_record import RunRow, find_run_folders, read_run_rows, sort_run_rows
from drawloom.graph import UserError
from support.run_folders import write_run

TIME = "2026-11-24 10:00:00,000 INFO drawloom.run: "
HEADER = f"{TIME}run     a, in runs/a\nmodel   Qwen3\n"
STOPPED = f"{TIME}stopped by SIGTERM after step 2; the same command resumes the run\n"
ENDED = f"{TIME}trained steps 1 to 4 in 0:00:01\nresults in runs/a\n"
FAILED = "2026-11-24 10:00:00,000 ERROR drawloom.distributed: rank 1 failed\n"


def hold(folder: Path, process: int, host: str = "") -> None:
    """Write the lock file of a process."""
    (folder / "run.lock").write_text(json.dumps({"host": host or socket.gethostname(), "pid": process}), "utf-8")


OWN_PROCESS = -1
"""The number of the process that runs the test, which differs between workers of pytest."""


@pytest.mark.parametrize(
    ("log", "process", "host", "state"),
    [
        ("", 0, "", "unknown"),
        (HEADER + STOPPED, 0, "", "stopped"),
        (HEADER + STOPPED + HEADER + ENDED, 0, "", "finished"),
        (HEADER + FAILED, 0, "", "failed"),
        (HEADER, OWN_PROCESS, "", "running"),
        (HEADER + ENDED + HEADER, 2**22 + 1, "", "interrupted"),
        (HEADER, 2**22 + 1, "elsewhere", "running"),
        (HEADER + ENDED, OWN_PROCESS, "", "finished"),
    ],
)
def test_a_run_has_the_state_of_its_newest_process(
    tmp_path: Path, log: str, process: int, host: str, state: str
) -> None:
    """A process without a logged end runs as long as it exists; a process of another host is believed to run."""
    write_run(tmp_path / "a", log=log)
    hold(tmp_path / "a", os.getpid() if process == OWN_PROCESS else process, host)
    [row] = read_run_rows(tmp_path)
    assert row.state == state


def test_a_row_has_numbers_and_differing_settings(tmp_path: Path) -> None:
    """The best loss has its step, the speed is tokens per second of steps; equal settings and names are left out."""
    log = f"{HEADER}{TIME}step 3/4  loss 3.5\n"
    write_run(tmp_path / "sweep/a", losses=(3.0, 2.0, 2.5), log=log)
    write_run(tmp_path / "b", lr=3e-4)
    first, second = read_run_rows(tmp_path)
    assert (first.run, second.run) == ("b", "sweep/a")
    assert second == RunRow(
        run="sweep/a",
        state="interrupted",
        step=3,
        steps=4,
        loss=3.5,
        best=2.0,
        best_step=2,
        tokens=300,
        tokens_per_second=50.0,
        ettr=second.ettr,
        differs={"optimizer.lr": "0.001"},
    )
    assert first.differs == {"optimizer.lr": "0.0003"}


def test_rows_are_sorted_by_number_with_missing_values_last(tmp_path: Path) -> None:
    """Settings are compared as numbers, too; an unknown column is an error with a list of all."""
    for name, lr, losses in (("a", 1e-3, (2.0,)), ("b", 3e-4, ()), ("c", 1e-2, (1.0,))):
        write_run(tmp_path / name, lr=lr, losses=losses)
    rows = read_run_rows(tmp_path)
    assert [row.run for row in sort_run_rows(rows, "best")] == ["c", "a", "b"]
    assert [row.run for row in sort_run_rows(rows, "best", reverse=True)] == ["a", "c", "b"]
    assert [row.run for row in sort_run_rows(rows, "optimizer.lr")] == ["b", "a", "c"]
    with pytest.raises(UserError, match=r"--sort speed: there is no such column; write one of run, .*, optimizer\.lr"):
        sort_run_rows(rows, "speed")


def test_links_to_runs_are_followed_once(tmp_path: Path) -> None:
    """Runs on another disk are in the table; a second link to a run, and a link to a folder above, add nothing."""
    write_run(tmp_path / "disk/old/a")
    write_run(tmp_path / "runs/b")
    for name, target in (("older", "disk/old"), ("best", "runs/b"), ("newest", "disk/old/a"), ("all", "runs")):
        (tmp_path / "runs" / name).symlink_to(tmp_path / target)
    names = [str(path.relative_to(tmp_path / "runs")) for path in find_run_folders(tmp_path / "runs")]
    assert names == ["b", "newest"]
    (tmp_path / "runs/newest").unlink()
    assert [row.run for row in read_run_rows(tmp_path / "runs")] == ["b", "older/a"]


def test_an_unreadable_run_hides_no_other(tmp_path: Path) -> None:
    """Its row says so, with the problem; hidden folders and folders in a run are not searched."""
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    write_run(tmp_path / ".tokens/c")
    write_run(tmp_path / "a/d")
    (tmp_path / "b/metrics.jsonl").unlink()
    (tmp_path / "b/metrics.jsonl").symlink_to("/dev/zero")
    assert [path.name for path in find_run_folders(tmp_path)] == ["a", "b"]
    first, second = read_run_rows(tmp_path)
    assert first.state == "unknown" and second.state == "unreadable" and "metrics.jsonl" in second.problem
