"""The log file of a rank: opened once, and anew if it is removed."""

import logging
import os
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any, TextIO

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import RunFolder
from drawloom.components.storage.regular_file import make_folder, open_to_append
from drawloom.graph import UserError

log = logging.getLogger("drawloom.run")


def rank_log(folder: RunFolder, mesh: Mesh) -> Path:
    """`log/rank-N.log` in the run folder; makes the folder `log`. A UserError if that is a link or a file."""
    return make_folder(folder.folder / "log") / f"rank-{mesh.world.rank}.log"


def open_log(path: Path) -> TextIO:
    """The log file, to append to; makes the folder `log` again if it was removed. Raises UserError."""
    make_folder(path.parent)
    # a lone surrogate, as in a file name, must not make logging fail
    return os.fdopen(open_to_append(path), "a", encoding="utf-8", errors="backslashreplace")


class LogFile(WatchedFileHandler):
    """Writes messages to a rank's log file, which is begun anew with a warning if it is removed."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message; an error is reported on standard error, and does not end the run."""
        before = self.stream
        try:
            super().emit(record)
        except UserError:
            self.handleError(record)
        if before is not None and self.stream is not None and self.stream is not before:
            log.warning("%s was removed during the run, and begins anew", self.baseFilename)

    def _open(self) -> Any:
        return open_log(Path(self.baseFilename))
