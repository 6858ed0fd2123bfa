"""I/O errors from saves in one log line, and the check for free disk space."""

import errno
import logging
from pathlib import Path

from drawloom.components.distributed.rank_errors import RankError, run_on_rank0
from drawloom.components.ports.distributed import Group
from drawloom.components.storage import durable_files
from drawloom.components.storage.byte_size import format_decimal_byte_size
from drawloom.graph import UserError

FULL = {errno.ENOSPC, errno.EDQUOT}

log = logging.getLogger("drawloom.checkpoint")


def describe_io_error_on_all_ranks(error: RankError, checkpoints: Path, needed_bytes: int, world: Group) -> str:
    """
    Describe an I/O error in one line, equal on all ranks; for a full disk with the bytes needed and free.

    A collective over `world`: the free bytes are those on the failed rank's machine.
    """
    if error.errno == errno.EFBIG:
        return f"{error}: a limit on the size of files, which `ulimit -f` shows, or one of the file system"
    if error.errno not in FULL:
        return str(error)
    try:
        own_free = format_decimal_byte_size(durable_files.count_free_bytes(checkpoints))
    except OSError:  # the folder may be gone
        own_free = "an unknown number of bytes"
    free = world.gather_json(own_free)[error.rank]
    return f"disk full: needs {format_decimal_byte_size(needed_bytes)}, {free} free in {checkpoints} ({error})"


def check_space_on_all_ranks(world: Group, checkpoints: Path, expected_bytes: int, last_checkpoint_bytes: int) -> None:
    """
    Raise UserError on all ranks if the disk has no space for one checkpoint; warn if it has no space for two.

    `expected_bytes` is this rank's part once all state exists. `last_checkpoint_bytes` is the newest checkpoint's size
    over all ranks, or 0: a state may exceed its forecast.
    """
    total = sum(world.gather_json(expected_bytes))
    run_on_rank0(world, lambda: _check_free_bytes(checkpoints, total, max(total, last_checkpoint_bytes)))


def _check_free_bytes(checkpoints: Path, expected_bytes: int, likely_bytes: int) -> None:
    """Raise UserError if fewer than `expected_bytes` are free; warn if fewer than twice `likely_bytes` are."""
    free = durable_files.count_free_bytes(checkpoints)
    if free < expected_bytes:
        raise UserError(
            f"{checkpoints}: a checkpoint needs about {format_decimal_byte_size(expected_bytes)}, and "
            f"{format_decimal_byte_size(free)} are free; free some space, or set run.folder to another disk"
        )
    # space for two, because the last checkpoint is removed only after the next commit
    if free < 2 * likely_bytes:
        log.warning(
            "%s: a checkpoint will need about %s, and %s are free; without space for two, saving may fail",
            checkpoints,
            format_decimal_byte_size(likely_bytes),
            format_decimal_byte_size(free),
        )
