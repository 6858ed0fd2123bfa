"""Runs whose processes are killed, stopped and started again, at random moments."""

from pathlib import Path

import pytest

from support.runs import rows, run_and_kill
from support.survival import write_recipe
from support.surviving import Findings, soak

WORDS = (
    "processes.on_failure=continue",
    "trainer.steps=100000",
    "checkpoint.every=50",
    "precision.parameter=float64",
    # at a quarter of the recipe's rate: at the whole one, training is unstable after 600 steps, and amplifies the
    # rounding of sums over ranks from 1e-16 to 1e-9 within 100 steps
    "optimizer.lr=0.001",
)
ROUNDING = 1e-9  # of float64, in whose sums over ranks the order varies
RECOVERY = 5.0  # seconds from a kill to the next finished step


def _survive(folder: Path, ranks: int, words: tuple[str, ...], faults: int, seed: int, seconds: float) -> Findings:
    """Return the findings of a run under faults; assert an undisturbed run's numbers in every step."""
    width = 2 if "mesh.data_shard=2" in words else 1
    findings = soak(write_recipe(folder), ranks, width, (*WORDS, *words), faults, seed, seconds)
    print(findings)
    assert not findings.stuck and not findings.orphans
    survived = rows(folder / "runs/tiny")
    assert [row["step"] for row in survived] == [*range(1, len(survived) + 1)] and len(survived) >= findings.steps
    assert run_and_kill(folder, "whole", "run", "recipe.toml", *WORDS, after=len(survived) + 1)
    for name in ("loss", "grad_norm", "lr", "tokens"):
        expected = [row[name] for row in rows(folder / "runs/whole")][: len(survived)]
        assert [row[name] for row in survived] == pytest.approx(expected, rel=ROUNDING), name
    return findings


@pytest.mark.soak
def test_a_run_survives_two_hundred_faults(tmp_path: Path) -> None:
    """No step is wrong, no process hangs or is left, and the next step after a kill is finished within seconds."""
    findings = _survive(tmp_path, 3, (), faults=200, seed=7, seconds=1200)
    assert findings.faults.total() >= 200 and findings.codes and {*findings.codes} == {143}
    assert max(findings.kills) < RECOVERY


@pytest.mark.soak
def test_replicas_of_shards_survive_faults(tmp_path: Path) -> None:
    """The same with replicas of two ranks, of which both must be there."""
    findings = _survive(tmp_path, 4, ("mesh.data_shard=2",), faults=20, seed=8, seconds=300)
    assert findings.faults.total() >= 20


@pytest.mark.soak
def test_shards_without_replicas_survive_faults(tmp_path: Path) -> None:
    """The same with three shards, each with a copy in its neighbour's memory; two losses may need the checkpoint."""
    words = ("mesh.data_shard=3", "checkpoint.neighbour_every=2")
    findings = _survive(tmp_path, 3, words, faults=20, seed=9, seconds=300)
    assert findings.faults.total() >= 20
