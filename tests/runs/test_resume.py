"""Resuming after a kill is bit-exact."""

import random
import signal as signals
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.runs import drawloom, killed, rows, series, write_corpus

LEARNED = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a corpus and the tiny recipe."""
    write_corpus(tmp_path)
    return tmp_path


def weights(run: Path) -> bytes:
    """The bytes of the exported weights."""
    return (run / "export" / "model.safetensors").read_bytes()


def wait_for_a_step(run: Path) -> None:
    """Wait until a run has tracked its first step."""
    end = time.monotonic() + 60
    while not ((run / "metrics.jsonl").exists() and rows(run)) and time.monotonic() < end:
        time.sleep(0.05)


def bits(run: Path) -> list[bytes]:
    """Every file of the last checkpoint except those that name the run: weights, moments, generators, data position."""
    return [path.read_bytes() for path in sorted((run / "checkpoints/step-60").glob("rank-*"))]


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_runs_end_with_the_same_bits(place: Path, workers: int) -> None:
    """
    After kills at random moments all metrics, exports and checkpoints equal those of the uninterrupted run without data
    workers, bit by bit; each step is tracked once.
    """
    common = ["run", "tiny.toml", "trainer.steps=60"]
    assert drawloom(place, *common, "run.name=straight")[0].code == 0
    moments, common = random.Random(workers), [*common, f"data.workers={workers}"]
    assert all(killed(place, "killed", *common, after=moments.uniform(1, 6)) for _ in range(2))
    assert drawloom(place, *common, "run.name=killed")[0].code == 0
    assert series(place / "runs/killed", *LEARNED) == series(place / "runs/straight", *LEARNED)
    assert [step for (step,) in series(place / "runs/killed", "step")] == list(range(1, 61))
    assert weights(place / "runs/killed") == weights(place / "runs/straight")
    assert bits(place / "runs/killed") == bits(place / "runs/straight") != []


def test_the_killed_runs_cross_several_epochs(place: Path) -> None:
    """60 steps of 4 rows of 32 tokens are more than the corpus, so that resuming crosses the end of an epoch."""
    assert sum(path.stat().st_size + 1 for path in (place / "corpus").glob("*.py")) < 60 * 4 * 32


def test_a_finished_run_does_nothing(place: Path) -> None:
    """The same command again reports it, and leaves every file unchanged."""
    assert drawloom(place, "run", "tiny.toml")[0].code == 0
    before = {path: path.stat().st_mtime_ns for path in (place / "runs/tiny").rglob("*") if path.suffix != ".log"}
    again = drawloom(place, "run", "tiny.toml")[0]
    after = {path: path.stat().st_mtime_ns for path in (place / "runs/tiny").rglob("*") if path.suffix != ".log"}
    assert again.code == 0 and "finished" in again.text
    assert {path for path in before | after if before.get(path) != after.get(path)} <= {place / "runs/tiny/run.lock"}


def test_missing_final_tasks_are_completed(place: Path) -> None:
    """A run that ended between its last commit and its export or sample makes them when it starts again."""
    assert drawloom(place, "run", "tiny.toml")[0].code == 0
    run = place / "runs/tiny"
    exported = weights(run)
    for path in (run / "export").iterdir():
        path.unlink()
    (run / "export").rmdir()
    (run / "sample.txt").unlink()
    assert drawloom(place, "run", "tiny.toml")[0].code == 0
    assert weights(run) == exported and (run / "sample.txt").exists() and len(rows(run)) == 10


def test_a_changed_recipe_is_refused_unless_free_or_accepted(place: Path) -> None:
    """A change that matters is named with its node and key; a free one, or any with --accept-changes, resumes."""
    first = ["run", "tiny.toml", "trainer.on_finish=[]"]
    assert drawloom(place, *first, "trainer.steps=4")[0].code == 0
    refused = drawloom(place, *first, "trainer.steps=4", "optimizer.lr=1e-3", "evaluate.every=2")[0]
    assert refused.code == 2 and "Traceback" not in refused.text
    assert "[optimizer] lr: 0.004 -> 0.001 (changes_training)" in refused.text and "--accept-changes" in refused.text
    free = drawloom(place, *first, "trainer.steps=4", "evaluate.every=2", "batch.micro_size=2", "data.workers=1")[0]
    assert free.code == 0
    accepted = drawloom(place, *first, "trainer.steps=6", "optimizer.lr=1e-3", "--accept-changes")[0]
    assert accepted.code == 0 and [row["step"] for row in rows(place / "runs/tiny")] == [1, 2, 3, 4, 5, 6]


def test_more_steps_are_free_if_nothing_derives_from_them(place: Path) -> None:
    """With a learning rate by steps a run can be extended; its first steps are unchanged."""
    constant = ["run", "tiny.toml", "trainer.on_finish=[]", "lr.start=1.0", "lr.phases=[{ to = 1.0, steps = 1 }]"]
    assert drawloom(place, *constant, "trainer.steps=4")[0].code == 0
    short = series(place / "runs/tiny", "step", "loss")
    assert drawloom(place, *constant, "trainer.steps=6")[0].code == 0
    assert series(place / "runs/tiny", "step", "loss")[:4] == short


def test_a_second_run_on_the_same_folder_is_refused(place: Path) -> None:
    """The error names the process and host that has the folder, and no file is touched."""
    words = ("run", "tiny.toml", "trainer.steps=100000", "checkpoint.every='last'")
    command = [sys.executable, "-m", "drawloom", *words]
    source = str(Path(__file__).parents[2] / "src")
    with subprocess.Popen(command, cwd=place, env={"PYTHONPATH": source}, stdout=subprocess.PIPE) as first:
        try:
            wait_for_a_step(place / "runs/tiny")
            half = place / "runs/tiny/checkpoints/.tmp-step-7"
            half.mkdir()
            second = drawloom(place, *words)[0]
        finally:
            first.kill()
    assert second.code == 1 and f"process {first.pid}" in second.text and "Traceback" not in second.text
    assert half.exists()  # whatever the first one has begun to write


@pytest.mark.parametrize(("signal", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_ends_the_run_with_a_checkpoint(place: Path, signal: str, code: int) -> None:
    """The current step is finished and saved, the exit code names the signal, and the run resumes later."""
    command = [sys.executable, "-m", "drawloom", "run", "tiny.toml", "trainer.steps=100000", "checkpoint.every='last'"]
    source = str(Path(__file__).parents[2] / "src")
    with subprocess.Popen(command, cwd=place, env={"PYTHONPATH": source}, stdout=subprocess.DEVNULL) as process:
        wait_for_a_step(place / "runs/tiny")
        process.send_signal(getattr(signals, signal))
        assert process.wait(30) == code
    saved = [path.name for path in (place / "runs/tiny/checkpoints").iterdir()]
    assert saved == [f"step-{rows(place / 'runs/tiny')[-1]['step']}"]
