"""Processes that stay alive between calls."""

import os

import pytest

from drawloom.components.proving.ranks import RankPool, RanksFailedError


def describe_rank(text: str) -> tuple[str, int]:
    """Return the rank's variable and the process id; raise or end on the word."""
    if text == "raise" and os.environ["RANK"] == "1":
        raise ValueError("wrong")
    if text == "die":
        os._exit(3)
    return os.environ["RANK"], os.getpid()


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
