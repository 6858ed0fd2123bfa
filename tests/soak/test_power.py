"""Power cuts on a real file system, where this process may mount one."""

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
    """Save one step after another, until the power is cut."""
    committed(0)
    for step in range(first, last + 1):
        save_steps(folder / "run", step, keep=2)
        committed(step)
    while True:
        pass


def _find(folder: Path) -> int:
    try:
        return restore_step(folder / "run")
    except (UserError, ValueError, OSError):
        return LOST


def _cuts(mutation: str, moments: list[float], last: int) -> list[Cut]:
    """Cut the power at these moments; runs in a separate process."""
    MUTATIONS[mutation]()
    return [cut(partial(_save, 1, last), after, _find) for after in moments]


if is_possible():

    def test_committed_steps_survive_power_cuts(tmp_path: Path) -> None:
        """Cut at random moments of many saves with retention: every committed step is restored."""
        moments = [random.Random(seed).uniform(0.0, 0.5) for seed in range(30)]
        [cuts] = run_ranks(_cuts, 1, "nothing", moments, 200, timeout=300)
        assert not [each for each in cuts if each.found < each.committed]
        assert len({each.committed for each in cuts}) > 5

    def test_a_step_is_on_disk_right_after_its_save(tmp_path: Path) -> None:
        """Also seconds later, after the file system has written its delayed blocks."""
        [cuts] = run_ranks(_cuts, 1, "nothing", [0.3, 0.3, 0.3, 2.0, 7.0], 3, timeout=300)
        assert [(each.committed, each.found) for each in cuts] == [(3, 3)] * 5

    def test_without_fsync_committed_steps_are_lost(tmp_path: Path) -> None:
        """The same program without fsync loses committed steps: the test above can fail."""
        [cuts] = run_ranks(_cuts, 1, "no_fsync", [0.3] * 5, 3, timeout=300)
        assert [each for each in cuts if each.found < each.committed]
