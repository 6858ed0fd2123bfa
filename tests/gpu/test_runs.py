"""
Whole runs on one GPU and on two replicas (NCCL): deterministic runs are bitwise equal, killed or not, offloaded or not,
and a failing rank ends the other.
"""

import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.aborts import WHERE, output_lines, run_with_fault
from support.gpu import drawloom_run
from support.runs import series

pytestmark = pytest.mark.gpu
limits_seconds = pytest.mark.xdist_group("seconds")  # tests that limit the seconds until the end do not compete

LEARNED = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")
COMMON = ("tiny.toml", "randomness.deterministic=true", "batch.micro_size=2", "trainer.steps=12")
SAVING = ("checkpoint.every=4", "checkpoint.keep=9", "trainer.on_finish=[]")
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": ("optimizer.use=optim.adamw",),
    "sgd": ("optimizer.use=optim.sgd", "optimizer.lr=0.05"),
    "stochastic_adamw": ("optimizer.use=optim.stochastic_adamw", "optimizer.lr=0.01", "precision.parameter=bfloat16"),
}
KERNELS = (
    *("model.hidden_size=64", "model.head_dim=32", "model.num_attention_heads=4", "model.num_key_value_heads=2"),
    *("model.intermediate_size=128", "precision.compute=bfloat16", "vars.length=128"),
)
"""Sizes and a dtype for which GPUs use their own kernels."""

one_or_two = pytest.mark.parametrize("processes", [1, 2], ids=["one GPU", "two GPUs"])


def run_to_end(folder: Path, name: str, *words: str, **how: Any) -> Path:
    """Run, check the exit code, and return the run folder."""
    outcome = drawloom_run(folder, *COMMON, *SAVING, f"run.name={name}", *words, **how)
    assert outcome.code == (0 if how.get("kill_after") is None else -9), outcome.text
    return folder / "runs" / name


def bits(run: Path) -> dict[str, bytes]:
    """Return every rank's weights, moments and generators after the last step, as bytes."""
    return {path.name: path.read_bytes() for path in (run / "checkpoints/step-12").glob("rank-*")}


def assert_same(run: Path, other: Path) -> None:
    """Assert equal metrics in all steps, and bitwise equal final states."""
    assert series(run, *LEARNED) == series(other, *LEARNED)
    assert [step for (step,) in series(run, "step")] == list(range(1, 13))
    assert bits(run) == bits(other) != {}


@one_or_two
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_killed_run_ends_with_the_same_bits(folder: Path, optimizer: str, processes: int) -> None:
    """A killed and restarted run is bitwise equal to an uninterrupted run, for every optimizer."""
    words = OPTIMIZERS[optimizer]
    straight = run_to_end(folder, "straight", *words, processes=processes)
    killed = run_to_end(folder, "killed", *words, processes=processes, kill_after=6)
    assert not (killed / "checkpoints/step-12").exists()
    assert_same(run_to_end(folder, "killed", *words, processes=processes), straight)
    assert "resuming after step" in (killed / "log/rank-0.log").read_text()


@one_or_two
def test_deterministic_run_is_repeatable(folder: Path, processes: int) -> None:
    """Two deterministic runs with GPU kernels are bitwise equal."""
    assert_same(*(run_to_end(folder, name, *KERNELS, processes=processes) for name in ("one", "other")))


@one_or_two
def test_verify_resume_finds_no_difference(folder: Path, processes: int) -> None:
    """`verify-resume` reports that a deterministic run resumes bitwise."""
    words = (*COMMON, "--steps", "8", "--ranks", str(processes))
    outcome = drawloom_run(folder, *words, command="verify-resume")
    assert outcome.code == 0 and "bit-identical: 8 steps" in outcome.text, outcome.text


def test_offloaded_run_has_the_bits_of_a_resident_run(folder: Path) -> None:
    """Activations and optimizer state in host memory change no loss, weight or moment, with 16 and with 8 bits."""
    stages = ("schedule.use=pipeline.schedules.looped_bfs", "schedule.stages_per_rank=4", "model.num_hidden_layers=4")
    runs: dict[str, list[Future[Path]]] = {}
    with ThreadPoolExecutor() as threads:  # the runs take most of their time to start
        for dtype in ("bfloat16", "uint8"):
            words = (*KERNELS, *OPTIMIZERS["stochastic_adamw"], *stages, f"optimizer.state_dtype={dtype}")
            offloaded = ("optimizer.states=host", "optimizer.slot_bytes=32768", "offload.use=pipeline.offloaded")
            runs[dtype] = [
                threads.submit(run_to_end, folder, f"resident-{dtype}", *words),
                threads.submit(run_to_end, folder, f"offloaded-{dtype}", *words, *offloaded),
            ]
    for pair in runs.values():
        assert_same(*(run.result() for run in pair))


@limits_seconds
@pytest.mark.parametrize("mesh", ["mesh.data_replicate=2", "mesh.pipeline=2"])
@pytest.mark.parametrize(("deed", "exit_code"), [("refuse", 2), ("refuse and hang", 2), ("fault", 1)])
def test_failing_rank_ends_the_other(folder: Path, deed: str, exit_code: int, mesh: str) -> None:
    """A failing rank ends the other within five seconds, and one message says which rank failed, where and why."""
    failures, outcomes, seconds = run_with_fault(folder, 2, deed, "model.num_hidden_layers=2", mesh)
    assert set(failures.values()) <= {f"died with exit code {exit_code}"}
    assert {outcome.code for outcome in outcomes.values()} <= {exit_code}
    assert seconds < 5
    assert WHERE in (folder / "runs/tiny/log/rank-0.log").read_text()
    if not failures:
        assert output_lines(outcomes)[-1].startswith(f"rank 1, {WHERE}: ")


@limits_seconds
def test_killed_rank_ends_the_other(folder: Path) -> None:
    """NCCL does not report a dead process, but the other rank notices and names it."""
    _failures, _outcomes, seconds = run_with_fault(folder, 2, "kill", "mesh.data_replicate=2")
    assert re.search(r"rank 1 \(process \d+\) is gone", (folder / "runs/tiny/log/rank-0.log").read_text())
    assert seconds < 5
