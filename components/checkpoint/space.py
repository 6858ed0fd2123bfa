"""Whether there is room for checkpoints, before the first step has cost anything."""

import logging
from pathlib import Path

from drawloom.components.checkpoint.io_errors import size
from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.ports.distributed import Group
from drawloom.components.storage import durable_files
from drawloom.graph import UserError

log = logging.getLogger("drawloom.checkpoint")


def check_space(world: Group, checkpoints: Path, sure: int, likely: int) -> None:
    """
    UserError on all ranks if there is no room for one checkpoint, and a warning if there is none for two.

    A checkpoint has at least `sure` bytes on this rank, and `likely` is what it will have in the long run. While the
    next one is written the last one is still there, so it takes room for two.
    """
    totals = [sum(column) for column in zip(*world.gather_json([sure, likely]), strict=True)]
    run_on_rank0(world, lambda: _check(checkpoints, *totals))


def _check(checkpoints: Path, sure: int, likely: int) -> None:
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
