"""The path of a rank's log file."""

from pathlib import Path

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import RunFolder


def rank_log(folder: RunFolder, mesh: Mesh) -> Path:
    """`log/rank-N.log` in the run folder; makes the folder `log`."""
    path = folder.folder / "log" / f"rank-{mesh.world.rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
