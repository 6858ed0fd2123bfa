"""Where a rank's log lies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.listeners.rank_log import rank_log


@attrs.frozen
class Folder:
    """A run folder."""

    folder: Path


@attrs.frozen
class Third:
    """A world as its third rank sees it."""

    rank: int = 2


def test_each_rank_has_a_log_of_its_own(tmp_path: Path, mesh_of: Callable[..., Any]) -> None:
    """Its name is the rank in the world, and its folder is made, once or twice."""
    for _ in range(2):
        assert rank_log(Folder(tmp_path), mesh_of(world=Third())) == tmp_path / "log" / "rank-2.log"
    assert (tmp_path / "log").is_dir()
