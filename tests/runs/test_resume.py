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


def read_weights(run: Path) -> bytes:
    """Return the bytes of the exported weights."""
    return (run / "export" / "model.safetensors").read_bytes()


def read_checkpoint(run: Path) -> list[bytes]:
    """Return the rank files of the last checkpoint: weights, moments, generators and data position."""
    return [path.read_bytes() for path in sorted((run / "checkpoints/step-60").glob("rank-*"))]


def test_killed_runs_end_with_the_same_bits(folder: Path) -> None:
    """
    After kills at random moments, metrics, export and checkpoint are bitwise equal to an uninterrupted run's.

    Every step is tracked once, with and without data workers, over several epochs.
    """
    common = ["run", "tiny.toml", "trainer.steps=60"]
    assert sum(path.stat().st_size + 1 for path in (folder / "corpus").glob("*.py")) < 60 * 4 * 32  # several epochs
    assert drawloom(folder, *common, "run.name=straight")[0].code == 0
    for workers, kills in ((0, 2), (2, 1)):
        moments, words, name = random.Random(workers), [*common, f"data.workers={workers}"], f"killed-{workers}"
        assert all(run_and_kill(folder, name, *words, after=moments.uniform(1, 6)) for _ in range(kills))
        assert drawloom(folder, *words, f"run.name={name}")[0].code == 0
        assert series(folder / "runs" / name, *LEARNED) == series(folder / "runs/straight", *LEARNED)
        assert [step for (step,) in series(folder / "runs" / name, "step")] == list(range(1, 61))
        assert read_weights(folder / "runs" / name) == read_weights(folder / "runs/straight")
        assert read_checkpoint(folder / "runs" / name) == read_checkpoint(folder / "runs/straight") != []


def test_a_finished_run_repeats_only_missing_final_tasks(folder: Path) -> None:
    """
    The same command again reports the end and changes no file.

    A run that ended between its last commit and its export or sample writes them when it starts again.
    """
    assert drawloom(folder, "run", "tiny.toml")[0].code == 0
    run = folder / "runs/tiny"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.suffix != ".log"}
    again = drawloom(folder, "run", "tiny.toml")[0]
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.suffix != ".log"}
    assert again.code == 0 and "finished" in again.text
    assert {path for path in before | after if before.get(path) != after.get(path)} <= {run / "run.lock"}

    exported = read_weights(run)
    for path in (run / "export").iterdir():
        path.unlink()
    (run / "export").rmdir()
    (run / "sample.txt").unlink()
    assert drawloom(folder, "run", "tiny.toml")[0].code == 0
    assert read_weights(run) == exported and (run / "sample.txt").exists() and len(rows(run)) == 10


def test_a_changed_recipe_is_refused_unless_free_or_accepted(folder: Path) -> None:
    """A relevant change is named by node and key; free changes, and all changes with --accept-changes, resume."""
    first = ["run", "tiny.toml", "trainer.on_finish=[]"]
    assert drawloom(folder, *first, "trainer.steps=4")[0].code == 0
    refused = drawloom(folder, *first, "trainer.steps=4", "optimizer.lr=1e-3", "evaluate.every=2")[0]
    assert refused.code == 2 and "Traceback" not in refused.text
    assert "[optimizer] lr: 0.004 -> 0.001 (changes_training)" in refused.text and "--accept-changes" in refused.text
    free = drawloom(folder, *first, "trainer.steps=4", "evaluate.every=2", "batch.micro_size=2", "data.prefetch=3")[0]
    assert free.code == 0
    accepted = drawloom(folder, *first, "trainer.steps=6", "optimizer.lr=1e-3", "--accept-changes")[0]
    assert accepted.code == 0 and [row["step"] for row in rows(folder / "runs/tiny")] == [1, 2, 3, 4, 5, 6]


def test_more_steps_are_free_if_nothing_derives_from_them(folder: Path) -> None:
    """With a learning rate by steps a run can be extended; its first steps are unchanged."""
    constant = ["run", "tiny.toml", "trainer.on_finish=[]", "lr.start=1.0", "lr.phases=[{ to = 1.0, steps = 1 }]"]
    assert drawloom(folder, *constant, "trainer.steps=4")[0].code == 0
    short = series(folder / "runs/tiny", "step", "loss")
    assert drawloom(folder, *constant, "trainer.steps=6")[0].code == 0
    assert series(folder / "runs/tiny", "step", "loss")[:4] == short


def test_a_second_run_on_the_same_folder_is_refused(folder: Path) -> None:
    """The error names the process and host that lock the folder, and no file is touched."""
    half = folder / "runs/tiny/checkpoints/.tmp-step-7"
    half.mkdir(parents=True)
    first = FolderLock(folder / "runs/tiny")
    try:
        second = drawloom(folder, "run", "tiny.toml")[0]
    finally:
        first.release()
    assert second.code == 1 and f"process {os.getpid()}" in second.text and "Traceback" not in second.text
    assert half.exists()  # a checkpoint that the first run is writing


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_with_a_checkpoint(folder: Path, number: int, code: int) -> None:
    """The current step is finished and saved, and the exit code names the signal."""
    words = ("run", "tiny.toml", "trainer.steps=100000", "checkpoint.every='last'")
    [outcome] = run_ranks(run_and_strike, 1, folder, words, int(number), variables=False)
    assert outcome.code == code and "Traceback" not in outcome.text
    saved = [path.name for path in (folder / "runs/tiny/checkpoints").iterdir()]
    assert saved == [f"step-{rows(folder / 'runs/tiny')[-1]['step']}"]


KILLED_IN: dict[str, tuple[Any, str]] = {
    "evaluation": (ProgramExecutor, "evaluate"),
    "export": (hf_writer, "_write_config_with_dtype"),
    "sample": (Sampler, "_sample_next_id"),
}


def _run_and_kill_in(folder: Path, arguments: Sequence[str], where: str) -> Outcome:
    """Run, and kill the process in its second evaluation, in the export or between two sampled tokens."""
    owner, name = KILLED_IN[where]
    call, calls = getattr(owner, name), [0]

    def kill_or_call(*values: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2 or where == "export":
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*values, **named)

    put(owner, name, kill_or_call)
    return command(folder, arguments, None)


def test_a_kill_in_an_evaluation_an_export_or_a_sample_changes_nothing(folder: Path) -> None:
    """A run killed in its evaluation, export and sample ends as an uninterrupted run."""
    words = ("run", "tiny.toml")
    assert drawloom(folder, *words, "run.name=straight")[0].code == 0
    for where in KILLED_IN:
        with pytest.raises(RanksFailedError, match="exit code -9"):
            run_ranks(_run_and_kill_in, 1, folder, words, where, variables=False)
    assert drawloom(folder, *words)[0].code == 0
    runs = folder / "runs/tiny", folder / "runs/straight"
    assert series(runs[0], *LEARNED) == series(runs[1], *LEARNED)
    assert read_weights(runs[0]) == read_weights(runs[1])
    assert (runs[0] / "sample.txt").read_bytes() == (runs[1] / "sample.txt").read_bytes()
