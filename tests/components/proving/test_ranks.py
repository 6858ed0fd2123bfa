"""Processes that stay alive between calls."""

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
