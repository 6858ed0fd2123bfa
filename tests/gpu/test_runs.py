"""
Whole runs on one GPU, and on two that hold the same parameters (NCCL): what is deterministic is the same to the last
bit, killed or not, and a rank that fails ends the other.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from support.aborts import WHERE, output_lines, run_with_fault
from support.gpu import drawloom_run
from support.runs import series

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("runs")]  # some have seconds to end in

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
"""Sizes and a dtype with which GPUs take kernels of their own."""

one_or_two = pytest.mark.parametrize("processes", [1, 2], ids=["one GPU", "two GPUs"])


def ran(folder: Path, name: str, *words: str, **how: Any) -> Path:
    """The folder of a run that ended as it should, or was killed."""
    found = drawloom_run(folder, *COMMON, *SAVING, f"run.name={name}", *words, **how)
    assert found.code == (0 if how.get("kill_after") is None else -9), found.text
    return folder / "runs" / name


def bits(run: Path) -> dict[str, bytes]:
    """Weights, moments and generators of every rank after the last step."""
    return {path.name: path.read_bytes() for path in (run / "checkpoints/step-12").glob("rank-*")}


def assert_same(run: Path, other: Path) -> None:
    """Every number of every step, and every bit of what both end with."""
    assert series(run, *LEARNED) == series(other, *LEARNED)
    assert [step for (step,) in series(run, "step")] == list(range(1, 13))
    assert bits(run) == bits(other) != {}


@one_or_two
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_killed_run_ends_with_the_same_bits(folder: Path, optimizer: str, processes: int) -> None:
    """Killed by SIGKILL in the middle and started again, with every optimizer, it is the run that was not killed."""
    words = OPTIMIZERS[optimizer]
    straight = ran(folder, "straight", *words, processes=processes)
    killed = ran(folder, "killed", *words, processes=processes, kill_after=6)
    assert not (killed / "checkpoints/step-12").exists()
    assert_same(ran(folder, "killed", *words, processes=processes), straight)
    assert "resuming after step" in (killed / "log/rank-0.log").read_text()


@one_or_two
def test_a_deterministic_run_is_the_same_twice(folder: Path, processes: int) -> None:
    """With the kernels that GPUs have of their own, compiled ones among them."""
    assert_same(*(ran(folder, name, *KERNELS, processes=processes) for name in ("one", "other")))


@one_or_two
def test_verify_resume_finds_no_difference(folder: Path, processes: int) -> None:
    """The command that anybody can type says that a deterministic run resumes to the last bit."""
    words = (*COMMON, "--steps", "8", "--ranks", str(processes))
    found = drawloom_run(folder, *words, command="verify-resume")
    assert found.code == 0 and "bit-identical: 8 steps" in found.text, found.text


@pytest.mark.parametrize("mesh", ["mesh.data_replicate=2", "mesh.pipeline=2"])
@pytest.mark.parametrize(("deed", "exit_code"), [("refuse", 2), ("refuse and hang", 2), ("fault", 1)])
def test_a_rank_that_fails_ends_the_other(folder: Path, deed: str, exit_code: int, mesh: str) -> None:
    """Within five seconds, though its device waits for the one that failed; one message says which, where and why."""
    failures, outcomes, seconds = run_with_fault(folder, 2, deed, "model.num_hidden_layers=2", mesh)
    assert set(failures.values()) <= {f"died with exit code {exit_code}"}
    assert {outcome.code for outcome in outcomes.values()} <= {exit_code}
    assert seconds < 5
    assert WHERE in (folder / "runs/tiny/log/rank-0.log").read_text()
    if not failures:
        assert output_lines(outcomes)[-1].startswith(f"rank 1, {WHERE}: ")


def test_a_rank_that_is_killed_ends_the_other(folder: Path) -> None:
    """Over NCCL nothing breaks when a process is gone: the other one sees that it is, and names it."""
    _failures, _outcomes, seconds = run_with_fault(folder, 2, "kill", "mesh.data_replicate=2")
    assert re.search(r"rank 1 \(process \d+\) is gone", (folder / "runs/tiny/log/rank-0.log").read_text())
    assert seconds < 5
