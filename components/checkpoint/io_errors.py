"""What the disk can do to a checkpoint, told in one line; the run can live with it for a while."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.distributed.rank_errors import run_on_all
from drawloom.components.ports.distributed import Group
from drawloom.components.storage import durable_files

UNITS = ("bytes", "kB", "MB", "GB", "TB")
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@attrs.frozen
class SaveIOError(Exception):
    """A system call failed for some rank, and nothing was committed: on which path, and what the system says."""

    where: str
    reason: str
    full: bool

    def told(self, checkpoints: Path, need: int) -> str:
        """In a line; a full disk with what was needed and what is there."""
        if not self.full:
            return f"{self.where}{self.reason}"
        return f"disk full: needs {size(need)}, {_free(checkpoints)} free in {checkpoints} ({self.where}{self.reason})"


def run_io_on_all(group: Group, work: Callable[[], Any]) -> list[Any]:
    """
    What `work` gave on each rank, as JSON carries it, by rank, on every rank.

    If the system failed any of them, every rank raises the Trouble of the first.
    """

    def attempt() -> dict[str, Any]:
        try:
            return {"value": work()}
        except OSError as error:
            return {"trouble": _trouble(error, f"rank {group.rank}: " if group.size > 1 else "")}

    outcomes = run_on_all(group, attempt)
    for outcome in outcomes:
        if "trouble" in outcome:
            raise SaveIOError(**outcome["trouble"])
    return [outcome["value"] for outcome in outcomes]


def run_io_on_rank0(group: Group, work: Callable[[], Any]) -> Any:
    """What `work` gave on the main rank, the only one that does it, on every rank."""
    return run_io_on_all(group, work if group.rank == 0 else lambda: None)[0]


def size(count: int) -> str:
    """Bytes for people."""
    power = min((len(str(count)) - 1) // 3, len(UNITS) - 1)
    return f"{count} bytes" if not power else f"{count / 1000**power:.1f} {UNITS[power]}"


def _trouble(error: OSError, rank: str) -> dict[str, Any]:
    path = f"{error.filename}: " if error.filename else ""
    return {"where": rank + path, "reason": error.strerror or str(error), "full": error.errno in FULL}


def _free(folder: Path) -> str:
    try:
        return size(durable_files.free(folder))
    except OSError:
        return "nobody knows how much"
