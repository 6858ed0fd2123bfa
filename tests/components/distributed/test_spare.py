"""Waiting for admission to a run."""

import time

import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from drawloom.components.distributed.generations import CURRENT, Generation, RunProcess
from drawloom.components.distributed.spare import LifeSigns


def test_a_spare_hears_every_rank_and_gives_up_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat of the last rank is enough, also if the first two are lost; without any, the run counts as gone."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store = HashStore()
    members = [RunProcess("elsewhere", rank) for rank in range(3)]
    is_alive = LifeSigns(PrefixStore("any", store), 5.0)
    PrefixStore("any", store).set(CURRENT, Generation("run", 0, members).to_json())
    for now[0] in (0.0, 4.0, 8.0, 12.0):
        store.add("drawloom/run/0/beat/2", 1)
        assert is_alive()
    now[0] = 17.5
    assert not is_alive()
