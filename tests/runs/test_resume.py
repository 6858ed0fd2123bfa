"""Resuming after a kill is bit-exact."""

import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.export import hf_writer
from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.run.locks import FolderLock
from drawloom.components.sampling.generate import Sampler
from support.mutations import put
from support.processes import RanksFailedError, run_ranks
from support.runs import Outcome, command, drawloom, rows, run_and_kill, run_and_strike, series

LEARNED = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")


def weights(run: Path) -> bytes:
    """The bytes of the exported weights."""
    return (run / "export" / "model.safetensors").read_bytes()


def bits(run: Path) -> list[bytes]:
    """Every file of the last checkpoint except those that name the run: weights, moments, generators, data position."""
    return [path.read_bytes() for path in sorted((run / "checkpoints/step-60").glob("rank-*"))]


def test_killed_runs_end_with_the_same_bits(place: Path) -> None:
    """
    After kills at random moments all metrics, exports and checkpoints equal those of the uninterrupted run without data
    workers, bit by bit; each step is tracked once. Resuming crosses the end of an epoch.
    """
    common = ["run", "tiny.toml", "trainer.steps=60"]
    assert sum(path.stat().st_size + 1 for path in (place / "corpus").glob("*.py")) < 60 * 4 * 32  # several epochs
    assert drawloom(place, *common, "run.name=straight")[0].code == 0
    for workers, kills in ((0, 2), (2, 1)):
        moments, words, name = random.Random(workers), [*common, f"data.workers={workers}"], f"killed-{workers}"
        assert all(run_and_kill(place, name, *words, after=moments.uniform(1, 6)) for _ in range(kills))
        assert drawloom(place, *words, f"run.name={name}")[0].code == 0
        assert series(place / "runs" / name, *LEARNED) == series(place / "runs/straight", *LEARNED)
        assert [step for (step,) in series(place / "runs" / name, "step")] == list(range(1, 61))
        assert weights(place / "runs" / name) == weights(place / "runs/straight")
        assert bits(place / "runs" / name) == bits(place / "runs/straight") != []


def test_a_finished_run_does_nothing_but_missing_final_tasks(place: Path) -> None:
    """
    The same command again reports it, and leaves every file unchanged; a run that ended between its last commit and its
    export or sample makes them when it starts again.
    """
    assert drawloom(place, "run", "tiny.toml")[0].code == 0
    run = place / "runs/tiny"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.suffix != ".log"}
    again = drawloom(place, "run", "tiny.toml")[0]
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.suffix != ".log"}
    assert again.code == 0 and "finished" in again.text
    assert {path for path in before | after if before.get(path) != after.get(path)} <= {run / "run.lock"}

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
    free = drawloom(place, *first, "trainer.steps=4", "evaluate.every=2", "batch.micro_size=2", "data.prefetch=3")[0]
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
    half = place / "runs/tiny/checkpoints/.tmp-step-7"
    half.mkdir(parents=True)
    first = FolderLock(place / "runs/tiny")
    try:
        second = drawloom(place, "run", "tiny.toml")[0]
    finally:
        first.release()
    assert second.code == 1 and f"process {os.getpid()}" in second.text and "Traceback" not in second.text
    assert half.exists()  # whatever the first one has begun to write


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_with_a_checkpoint(place: Path, number: int, code: int) -> None:
    """The current step is finished and saved, and the exit code names the signal."""
    words = ("run", "tiny.toml", "trainer.steps=100000", "checkpoint.every='last'")
    [outcome] = run_ranks(run_and_strike, 1, place, words, int(number), variables=False)
    assert outcome.code == code and "Traceback" not in outcome.text
    saved = [path.name for path in (place / "runs/tiny/checkpoints").iterdir()]
    assert saved == [f"step-{rows(place / 'runs/tiny')[-1]['step']}"]


KILLED_IN: dict[str, tuple[Any, str]] = {
    "evaluation": (ProgramExecutor, "evaluate"),
    "export": (hf_writer, "_write_config"),
    "sample": (Sampler, "_sample"),
}


def _killed_in(folder: Path, arguments: Sequence[str], where: str) -> Outcome:
    """A process that is killed in the second of its evaluations, in the export, or between two sampled tokens."""
    owner, name = KILLED_IN[where]
    call, times = getattr(owner, name), [0]

    def fatal(*values: Any, **named: Any) -> Any:
        times[0] += 1
        if times[0] == 2 or where == "export":
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*values, **named)

    put(owner, name, fatal)
    return command(folder, arguments, None)


def test_a_kill_in_an_evaluation_an_export_or_a_sample_changes_nothing(place: Path) -> None:
    """Killed in each in turn, the run ends with the metrics, weights and sample of one that never was."""
    words = ("run", "tiny.toml")
    assert drawloom(place, *words, "run.name=straight")[0].code == 0
    for where in KILLED_IN:
        with pytest.raises(RanksFailedError, match="exit code -9"):
            run_ranks(_killed_in, 1, place, words, where, variables=False)
    assert drawloom(place, *words)[0].code == 0
    runs = place / "runs/tiny", place / "runs/straight"
    assert series(runs[0], *LEARNED) == series(runs[1], *LEARNED)
    assert weights(runs[0]) == weights(runs[1])
    assert (runs[0] / "sample.txt").read_bytes() == (runs[1] / "sample.txt").read_bytes()
