"""Runs killed at random moments finish with the bits of the uninterrupted run."""

from pathlib import Path

import pytest

from support.processes import run_ranks
from support.soak import SURVIVOR, Findings, Job, crash_loop, soak

JOBS = [Job(1, "blocking"), Job(2, "blocking"), Job(1, "overlapped"), Job(2, "overlapped"), Job(1, "none")]


def _soak(folder: Path, jobs: list[Job], kills: int, seed: int, seconds: float, wanted: str = "") -> Findings:
    arguments = folder, jobs, kills, seed, seconds, wanted
    findings: Findings = run_ranks(soak, 1, *arguments, timeout=seconds + 120, variables=False)[0]
    print(findings)
    return findings


def _assert_sound(findings: Findings) -> None:
    assert not findings.different  # weights, moments, generators, data position, and the metrics of every step
    assert not findings.lost  # every committed step is restored
    assert not findings.torn  # folders named by a step are complete
    assert not findings.grown  # no files are left over
    assert not findings.stuck  # ranks that lose a peer end
    assert findings.slowest <= SURVIVOR  # and they end soon


@pytest.mark.soak
def test_run_survives_a_few_kills(tmp_path: Path) -> None:
    """A few kills change no bit and lose no step, with blocking writes and with overlapped writes on two ranks."""
    findings = _soak(tmp_path, [JOBS[0], JOBS[3]], kills=6, seed=1, seconds=60)
    _assert_sound(findings)
    assert findings.kills.total() >= 2
    assert findings.finished >= 1


@pytest.mark.soak
def test_run_survives_two_hundred_kills(tmp_path: Path) -> None:
    """Two hundred kills in every longer phase change no bit and lose no committed step."""
    findings = _soak(tmp_path, JOBS, kills=200, seed=2, seconds=900)
    _assert_sound(findings)
    assert findings.kills.total() >= 200
    assert {"start", "train", "write"} <= findings.kills.keys()


@pytest.mark.soak
def test_four_ranks_survive_fifty_kills(tmp_path: Path) -> None:
    """Fifty kills change no bit and lose no step on four ranks: replicas, pipelines, and meshes with sliced state."""
    meshes = [(), (("pipeline", 2),), (("data_shard", 4),), (("tensor", 2), ("data_shard", 2))]
    jobs = [Job(4, ("overlapped", "blocking")[number % 2], mesh=mesh) for number, mesh in enumerate(meshes)]
    findings = _soak(tmp_path, jobs, kills=50, seed=5, seconds=900)
    _assert_sound(findings)
    assert findings.kills.total() >= 50 and findings.finished >= 2


@pytest.mark.parametrize("times", [6, pytest.param(60, marks=pytest.mark.soak)])
def test_crash_loop_loses_nothing(tmp_path: Path, times: int) -> None:
    """A run that is killed repeatedly while it starts and loads loses nothing, leaves no files, and completes."""
    arguments = tmp_path, Job(1, "blocking"), times, 4
    findings: Findings = run_ranks(crash_loop, 1, *arguments, timeout=300, variables=False)[0]
    print(findings)
    _assert_sound(findings)
    assert findings.finished == 1 and findings.kills.total() > times // 2


@pytest.mark.soak
@pytest.mark.parametrize(
    ("mutation", "where"),
    [
        ("no_randomness", "different"),
        ("no_moments", "different"),
        ("no_rename", "torn"),
        ("expire_before_commit", "lost"),
    ],
)
def test_harness_finds_faults(tmp_path: Path, mutation: str, where: str) -> None:
    """Every mutation is caught by its own finding."""
    findings = _soak(tmp_path, [Job(1, "blocking", mutation)], kills=40, seed=3, seconds=120, wanted=where)
    assert getattr(findings, where)
