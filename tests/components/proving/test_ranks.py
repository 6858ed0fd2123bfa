"""Processes that stay alive between calls."""

import os
from pathlib import Path

import pytest

from drawloom.components.proving.ranks import RankPool, RanksFailedError
from support.processes import describe_rank


def test_processes_are_kept_until_one_fails() -> None:
    """Two calls run in the same processes, by rank; after a failure, which is reported by rank, there are new ones."""
    pool = RankPool(2)
    try:
        first, second = (pool.call(describe_rank, "a", timeout=60) for _ in range(2))
        assert first == second and [rank for rank, _ in first] == ["0", "1"]
        with pytest.raises(RanksFailedError, match="ValueError: wrong") as caught:
            pool.call(describe_rank, "raise", timeout=60)
        assert [*caught.value.failures] == [1] and caught.value.last_line == "ValueError: wrong"
        third = pool.call(describe_rank, "a", timeout=60)
        assert not {pid for _, pid in third} & {pid for _, pid in first}
        with pytest.raises(RanksFailedError, match="the process died"):
            pool.call(describe_rank, "die", timeout=60)
    finally:
        pool.close()


def test_calls_run_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths of a later call's recipe do not mean the folder in which the processes began."""
    pool = RankPool(1)
    try:
        pool.call(os.getcwd, timeout=60)
        monkeypatch.chdir(tmp_path)
        assert pool.call(os.getcwd, timeout=60) == [str(tmp_path)]
    finally:
        pool.close()
