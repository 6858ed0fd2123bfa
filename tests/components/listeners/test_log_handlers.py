"""The path of a rank's log file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.listeners.log_handlers import prepare_rank_log_path
from support.folders import Folder


@attrs.frozen
class Third:
    """A world group as rank 2 sees it."""

    rank: int = 2


def test_each_rank_has_its_own_log(tmp_path: Path, mesh_of: Callable[..., Any]) -> None:
    """The name has the global rank; the folder is made if it does not exist."""
    for _ in range(2):
        assert prepare_rank_log_path(Folder(tmp_path), mesh_of(world=Third())) == tmp_path / "log" / "rank-2.log"
    assert (tmp_path / "log").is_dir()
