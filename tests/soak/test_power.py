"""Power cuts on a real file system, if this process may mount one."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from drawloom.graph import UserError
from support.checkpoints import restore_step, save_steps
from support.mutations import MUTATIONS
from support.power import Cut, cut, is_possible
from support.processes import run_ranks

pytestmark = pytest.mark.soak

LOST = -1


def _save(first: int, last: int, folder: Path, committed: Callable[[int], None]) -> None:
    """Save consecutive steps until the power is cut."""
    committed(0)
    for step in range(first, last + 1):
        save_steps(folder / "run", step, keep=2)
        committed(step)
    while True:
        pass


def _restore_or_lost(folder: Path) -> int:
    try:
        return restore_step(folder / "run")
    except (UserError, ValueError, OSError):
        return LOST


def _cut_power(mutation: str, moments: list[float], last: int) -> list[Cut]:
    """Apply a mutation to this process, and cut the power at the given moments."""
    MUTATIONS[mutation]()
    return [cut(partial(_save, 1, last), after, _restore_or_lost) for after in moments]


if is_possible():

    def test_committed_steps_survive_power_cuts(tmp_path: Path) -> None:
        """Every committed step is restored after a power cut at a random moment of saves with retention."""
        moments = [random.Random(seed).uniform(0.0, 0.5) for seed in range(30)]
        [cuts] = run_ranks(_cut_power, 1, "nothing", moments, 200, timeout=300)
        assert not [result for result in cuts if result.found < result.committed]
        assert len({result.committed for result in cuts}) > 5

    def test_step_is_on_disk_right_after_its_save(tmp_path: Path) -> None:
        """Saved steps survive a power cut right after the save, and one after the file system's delayed writes."""
        [cuts] = run_ranks(_cut_power, 1, "nothing", [0.3, 0.3, 0.3, 2.0, 7.0], 3, timeout=300)
        assert [(result.committed, result.found) for result in cuts] == [(3, 3)] * 5

    def test_without_fsync_committed_steps_are_lost(tmp_path: Path) -> None:
        """Without fsync committed steps are lost, so the tests above can fail."""
        [cuts] = run_ranks(_cut_power, 1, "no_fsync", [0.3] * 5, 3, timeout=300)
        assert [result for result in cuts if result.found < result.committed]
