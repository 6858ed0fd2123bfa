"""Sweeps of small runs."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drawloom.components.report.run_record import read_run_rows
from support.forked_children import fork_children
from support.processes import run_ranks
from support.runs import deterministic_rows, drawloom

SWEEP = ["sweep", "tiny.toml", "trainer.steps=8", "optimizer.lr=1e-3,3e-4"]


def test_a_sweep_is_resumed_as_a_whole(folder: Path) -> None:
    """
    Interrupted in its first run, a sweep ends with the code of the signal. Started again it resumes this run, does the
    other, and a third time nothing; its metrics are those of a run without an interruption.
    """
    runs = folder / "runs/tiny-sweep"
    first = runs / "lr=0.001"
    [(code, printed)] = run_ranks(_sweep_and_terminate, 1, folder, first, timeout=120, variables=False)
    assert "the sweep is stopped; the same command resumes it" in printed
    assert code == 128 + signal.SIGTERM
    assert [row.run for row in read_run_rows(runs)] == ["lr=0.001"]
    dry = drawloom(folder, *SWEEP, "--dry-run")[0]
    assert "lr=0.001  stopped" in dry.text and "lr=0.0003  new" in dry.text, dry.text
    assert drawloom(folder, *SWEEP)[0].code == 0
    assert [(row.run, row.state, row.step) for row in read_run_rows(runs)] == [
        ("lr=0.0003", "finished", 8),
        ("lr=0.001", "finished", 8),
    ]
    again = drawloom(folder, *SWEEP)[0]
    assert again.code == 0 and again.text.count("is finished") == 2, again.text
    straight = drawloom(folder, "run", "tiny.toml", "trainer.steps=8", "optimizer.lr=1e-3")[0]
    assert straight.code == 0, straight.text
    assert deterministic_rows(first) == deterministic_rows(folder / "runs/tiny")


def _sweep_and_terminate(folder: Path, run: Path) -> tuple[int, str]:
    """Sweep in forks of this process until a run has a step, and return the exit code and standard error."""
    fork_children()
    sweep = subprocess.Popen([sys.executable, "-m", "drawloom", *SWEEP], cwd=folder, stderr=subprocess.PIPE, text=True)
    while sweep.poll() is None and not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size):
        time.sleep(0.01)
    sweep.send_signal(signal.SIGTERM)
    printed = sweep.communicate(timeout=100)[1]
    return sweep.returncode, printed


def test_all_points_are_checked_before_the_first_run(folder: Path) -> None:
    """A mistake in the last point, or in the folder, is reported with its reason, and no run has started."""
    outcome = drawloom(folder, "sweep", "tiny.toml", "optimizer.lr=1e-3,high")[0]
    assert outcome.code == 2 and '"high"' in outcome.text, outcome.text
    file = drawloom(folder, "sweep", "tiny.toml", "optimizer.lr=1e-3,3e-4", "--to", "tiny.toml")[0]
    assert file.code == 2 and "tiny.toml is not a folder; write another one with --to" in file.text, file.text
    assert not (folder / "runs").exists()


def test_a_failed_run_does_not_end_the_sweep(folder: Path) -> None:
    """The others run, here two at a time; the command names the failed one, and its code is 1."""
    (folder / "fails").mkdir()
    (folder / "fails/lr=1.0").write_text("not a folder", "utf-8")
    words = ["sweep", "tiny.toml", "trainer.steps=1", "optimizer.lr=1.0,2.0", "--to", "fails", "--jobs", "2"]
    outcome = drawloom(folder, *words)[0]
    assert "lr=2.0 has finished" in outcome.text and "lr=1.0 ended with code" in outcome.text
    assert outcome.code == 1 and "failed: lr=1.0; the same command tries them again" in outcome.text, outcome.text
    assert [(row.run, row.state) for row in read_run_rows(folder / "fails")] == [("lr=2.0", "finished")]


def test_a_search_goes_on_from_its_folder(folder: Path) -> None:
    """
    The points that a search has chosen run again if they have not finished, and then others follow. A chosen point that
    has finished before does not run again. A run without the metric ends the search, and points of a search can't be
    submitted.
    """
    pytest.importorskip("optuna", reason="needs the package optuna: pip install 'drawloom[search]'")
    words = ["sweep", "tiny.toml", "trainer.steps=1", "trainer.on_finish=[]", "optimizer.lr=1e-4..1e-1:log"]
    runs = folder / "runs/tiny-sweep"
    first = drawloom(folder, *words, "--search", "1", "--metric", "loss")[0]
    [row] = read_run_rows(runs)
    assert first.code == 0 and row.state == "finished", first.text
    shutil.rmtree(runs / row.run)
    second = drawloom(folder, *words, "--search", "2", "--metric", "loss")[0]
    rows = read_run_rows(runs)
    assert second.code == 0 and f"run 1 of 2: {row.run}" in second.text, second.text
    assert len(rows) == 2 and row.run in {row.run for row in rows} and {row.state for row in rows} == {"finished"}
    (runs / "search.json").unlink()
    third = drawloom(folder, *words, "--search", "2", "--metric", "loss")[0]
    assert third.code == 0 and third.text.count("is finished") == 2, third.text
    none = drawloom(folder, *words, "--search", "3", "--metric", "accuracy")[0]
    assert none.code == 2 and "--metric accuracy: " in none.text and len(read_run_rows(runs)) == 2, none.text
    refused = drawloom(folder, *words, "--search", "4", "--submit", "sweep.sh")[0]
    assert refused.code == 2 and "use --random N" in refused.text, refused.text


def test_runs_that_do_not_fit_are_refused_before_the_first(folder: Path) -> None:
    """With a device all points are planned; too large ones are named with their bytes."""
    device = "memory = 0.2\nbandwidth = 100.0\nlink = 10.0\nnetwork = 1.0\nfloat32 = 1.0\nbfloat16 = 1.0\n"
    (folder / "small.toml").write_text(device, "utf-8")
    words = ["sweep", "tiny.toml", "model.intermediate_size=32,262144", "--device", "small.toml"]
    outcome = drawloom(folder, *words)[0]
    assert outcome.code == 1 and "1 of 2 runs do not fit" in outcome.text, outcome.text
    assert "intermediate_size=262144: " in outcome.text and not (folder / "runs").exists()
