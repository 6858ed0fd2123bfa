"""The disk under the checkpoints: whether it has room for them, and I/O errors during a save as one log line."""

import errno
import logging
from pathlib import Path

from drawloom.components.distributed.rank_errors import Agreed, run_on_rank0
from drawloom.components.ports.distributed import Group
from drawloom.components.storage import durable_files
from drawloom.graph import UserError

UNITS = ("bytes", "kB", "MB", "GB", "TB")
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

log = logging.getLogger("drawloom.checkpoint")


def described(error: Agreed, checkpoints: Path, need: int) -> str:
    """An I/O error in a line; a full disk with the bytes that were needed and those that are free."""
    if error.errno not in FULL:
        return str(error)
    try:
        free = size(durable_files.free(checkpoints))
    except OSError:  # the folder may be gone
        free = "an unknown number of bytes"
    return f"disk full: needs {size(need)}, {free} free in {checkpoints} ({error})"


def check_space(world: Group, checkpoints: Path, sure: int, likely: int) -> None:
    """
    UserError on all ranks if there is no room for one checkpoint, and a warning if there is none for two.

    `sure` is how many bytes a checkpoint has on this rank at least, `likely` how many it will have after some steps.
    It takes room for two, because the last one is removed only after the next one is committed.
    """
    totals = [sum(column) for column in zip(*world.gather_json([sure, likely]), strict=True)]
    run_on_rank0(world, lambda: _check_space(checkpoints, *totals))


def size(count: int) -> str:
    """Bytes for people, in powers of a thousand."""
    power = min((len(str(count)) - 1) // 3, len(UNITS) - 1)
    return f"{count} bytes" if not power else f"{count / 1000**power:.1f} {UNITS[power]}"


def _check_space(checkpoints: Path, sure: int, likely: int) -> None:
    free = durable_files.free(checkpoints)
    if free < sure:
        raise UserError(
            f"{checkpoints}: a checkpoint needs {size(sure)}, and {size(free)} are free; make room, or set the folder "
            "of the run to another disk"
        )
    if free < 2 * likely:
        log.warning(
            "%s: a checkpoint will need about %s, and %s are free; without room for two, saving may fail",
            checkpoints,
            size(likely),
            size(free),
        )
