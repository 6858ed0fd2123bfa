"""CPU threads of a process."""

import os
from pathlib import Path

import pytest

from drawloom.components.distributed import cpu_threads
from drawloom.components.distributed.cpu_threads import (
    count_threads_per_process,
    count_usable_cores,
    shorten_thread_spinning,
)


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8), ("", 8)]
)
def test_usable_cores_respect_affinity_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    """A container of one and a half cores has two, and none has more than its affinity."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "cpu.max").write_text(quota)
    assert count_usable_cores(tmp_path / "cpu.max") == cores
    assert count_usable_cores(tmp_path / "missing") == 8


@pytest.mark.parametrize(("processes", "threads"), [(1, 8), (2, 4), (3, 2), (8, 1), (100, 1)])
def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch, processes: int, threads: int) -> None:
    """All processes together have no more threads than cores, and each has at least one."""
    monkeypatch.setattr(cpu_threads, "count_usable_cores", lambda: 8)
    assert count_threads_per_process(processes) == threads


@pytest.mark.parametrize(
    ("load", "given", "spins"),
    [
        (0.3, {}, None),
        (5.0, {}, "100"),
        (5.0, {"GOMP_SPINCOUNT": "7"}, "7"),
        (5.0, {"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ],
)
def test_waiting_threads_sleep_on_a_busy_machine(load: float, given: dict[str, str], spins: str | None) -> None:
    """Idle cores and the user's variables are left alone."""
    shorten_thread_spinning(given, load)
    assert given.get("GOMP_SPINCOUNT") == spins
