"""Pipelines over NCCL: two processes, on separate GPUs or sharing one."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from support import pipelines
from support.processes import RanksFailedError, run_ranks
from support.runs import drawloom, run_and_strike, series, take_back, write_corpus

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("pipelines")]  # the module's runs are shared

LOSSES = {1: "dft", 5: "smoothed", 8: "tempered"}
CASES: list[pipelines.Case] = [
    (name, count, True, False, LOSSES[count]) for name in pipelines.TRAINING for count in (1, 5, 8)
]
COMMON = (
    "run",
    "tiny.toml",
    "model.num_hidden_layers=4",
    "batch.global_size=8",
    "batch.micro_size=1",
    "trainer.steps=6",
)
LEARNED = ("loss", "grad_norm", "validation_loss", "tokens")


@pytest.fixture(scope="module")
def parts() -> list[list[dict[str, Any]]]:
    """Return both ranks' results after a step of every case."""
    return run_ranks(pipelines.steps, 2, CASES, {}, "cuda", timeout=180)


@pytest.fixture(scope="module")
def wholes() -> dict[int, dict[str, Any]]:
    """Return the same steps in one process on one GPU, by number of microbatches."""
    counts = (1, 5, 8)
    cases = [("gpipe", count, True, False, LOSSES[count]) for count in counts]
    (steps,) = run_ranks(pipelines.steps, 1, cases, {}, "cuda", timeout=60)
    return dict(zip(counts, steps, strict=True))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_schedules_over_nccl_match_one_process(number: int, parts: Any, wholes: Any) -> None:
    """All schedules and numbers of microbatches have one process's float64 losses and gradients, with tied weights."""
    case = CASES[number]
    whole, mine = wholes[case[1]], [rank[number] for rank in parts]
    assert sum(part["loss"] for part in mine) == pytest.approx(whole["loss"], rel=1e-10), case
    assert sum(part["held_out"] for part in mine) == pytest.approx(whole["held_out"], rel=1e-10), case
    for part in mine:
        for parameter, grad in part["grads"].items():
            torch.testing.assert_close(grad, whole["grads"][parameter], rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus, the tiny recipe, and its run on one GPU."""
    folder = tmp_path_factory.mktemp("pipeline")
    write_corpus(folder)
    outcome = drawloom(folder, *COMMON, "run.name=one")[0]
    assert outcome.code == 0, outcome
    return folder


def assert_same(run: Path, other: Path) -> None:
    """Assert that losses and gradient norms agree to the float32 error of some steps."""
    ours, theirs = series(run, *LEARNED), series(other, *LEARNED)
    assert len(ours) == len(theirs) == 6
    for mine, yours in zip(ours, theirs, strict=True):
        assert [value or 0 for value in mine] == pytest.approx([value or 0 for value in yours], rel=1e-4)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved_1f1b", "zero_bubble_1p", "dual_pipe_v"])
def test_pipeline_run_on_two_gpus_matches_one_gpu(runs_folder: Path, schedule: str) -> None:
    """A pipeline run has one GPU's losses, writes export and sample, and prints no warning."""
    words = [*COMMON, f"run.name={schedule}", "mesh.pipeline=2", f"schedule.use=pipeline.schedules.{schedule}"]
    outcomes = drawloom(runs_folder, *words, ranks=2)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert "arning" not in outcomes[0].text + outcomes[1].text, outcomes
    run = runs_folder / "runs" / schedule
    assert_same(runs_folder / "runs/one", run)
    assert (run / "export/config.json").exists() and (run / "sample.txt").exists()


def test_replicas_on_two_gpus_match_one_gpu(runs_folder: Path) -> None:
    """Two data-parallel processes have one GPU's losses."""
    outcomes = drawloom(runs_folder, *COMMON, "run.name=replicas", ranks=2)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert_same(runs_folder / "runs/one", runs_folder / "runs/replicas")


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_run_moves_between_one_and_two_gpus(runs_folder: Path, before: int, after: int) -> None:
    """A pipeline of two GPUs resumes one GPU's checkpoint, and vice versa."""
    name = f"from{before}to{after}"
    for ranks in (before, after):
        words = [*COMMON, f"run.name={name}", "checkpoint.every=3", "checkpoint.keep=9", f"mesh.pipeline={ranks}"]
        outcomes = drawloom(runs_folder, *words, ranks=ranks)
        assert {outcome.code for outcome in outcomes} == {0}, outcomes
        if ranks == before:
            take_back(runs_folder / "runs" / name, 3)
    assert_same(runs_folder / "runs/one", runs_folder / "runs" / name)


ENDLESS = ("trainer.steps=1000000", "checkpoint.every='last'", "listeners.timeouts.step=8.0")


@pytest.mark.parametrize("mesh", ["mesh.pipeline=2", "mesh.data_replicate=2"])
@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGKILL, 5.0), (signal.SIGSTOP, 16.0)])
def test_killed_or_hanging_rank_is_named(runs_folder: Path, number: int, seconds: float, mesh: str) -> None:
    """Rank 0 names rank 1 and ends, at once if rank 1 is dead, or at the time limit if rank 1 hangs."""
    name = f"run.name={mesh[5:9]}{int(number)}"
    arguments = ["run", "tiny.toml", name, "model.num_hidden_layers=2", "batch.micro_size=1", mesh, *ENDLESS]
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(run_and_strike, 2, runs_folder, arguments, int(number), timeout=120, lost={1})
    run = runs_folder / "runs" / name.removeprefix("run.name=")
    took = time.time() - (run / "struck").stat().st_mtime
    survivor = caught.value.values.get(0)
    told = (run / "log/rank-0.log").read_text("utf-8") + (survivor.text if survivor is not None else "")
    assert "rank 1" in told and took < seconds, (took, told)
