"""Handlers for a run's log: a rank's file, and the terminal."""

import logging
import os
import warnings
from collections.abc import Callable, Iterable
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any, TextIO

from drawloom import UserError
from drawloom.components.storage.durable_files import create_folder_unless_link, open_to_append
from drawloom.graph.cli.terminal import Stream, print_escaped_text
from drawloom.ports import PRINTED, Mesh, Processes, RunFolder, is_marked, run_log


def prepare_rank_log_path(folder: RunFolder, mesh: Mesh) -> Path:
    """Return `log/rank-N.log` in the run folder, and create `log`. Raises UserError if `log` is a link or a file."""
    return create_folder_unless_link(folder.folder / "log") / f"rank-{mesh.world.rank}.log"


def describe_host_and_mesh_indices(mesh: Mesh, launches: Iterable[Processes]) -> str:
    """Return this rank's host and mesh indices, without hosts and dimensions of size 1."""
    sizes = mesh.sizes.without_expert_dimensions()
    parts = [f"host {launch.node_rank}" for launch in launches if launch.node_count > 1]
    parts += [f"{name} {index}" for name, index in mesh.indices.without_expert_dimensions().items() if sizes[name] > 1]
    return f"[{', '.join(parts)}] " if parts else ""


def open_log_for_appending(path: Path) -> TextIO:
    """Open a log file for appending, and create its folder again if it was removed. Raises UserError."""
    create_folder_unless_link(path.parent)
    # a lone surrogate, as in a file name, must not make logging fail
    return os.fdopen(open_to_append(path), "a", encoding="utf-8", errors="backslashreplace")


class LogFile(WatchedFileHandler):
    """Handler for a rank's log file; if the file is removed, the handler creates it again and warns."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message, or report an error on standard error without ending the run."""
        before = self.stream
        try:
            super().emit(record)
        except UserError:
            self.handleError(record)
        if before is not None and self.stream is not None and self.stream is not before:
            run_log.warning("%s was removed during the run, and begins anew", self.baseFilename)

    def _open(self) -> Any:
        return open_log_for_appending(Path(self.baseFilename))


class Terminal(logging.Handler):
    """Handler for the current `sys.stdout` or `sys.stderr`, which a progress bar may replace; without tracebacks."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message. If standard output fails, log a warning and continue."""
        try:
            print_escaped_text(self.format(record), self._stream)
        except (BrokenPipeError, UserError) as error:
            why = "the reader of standard output has closed it" if isinstance(error, BrokenPipeError) else error
            run_log.warning("%s; step lines are not printed any more, and the run continues", why)
        except Exception:
            self.handleError(record)


class _OneLineFormatter(logging.Formatter):
    """Formatter without tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {record.getMessage()}"


def is_for_stdout(record: logging.LogRecord) -> bool:
    """Return whether a record is a line for standard output: an INFO message from `drawloom.run`."""
    return record.name == "drawloom.run" and record.levelno == logging.INFO


def is_for_stderr(record: logging.LogRecord) -> bool:
    """Return whether a record is neither a line for standard output nor printed already."""
    return not is_for_stdout(record) and not is_marked(record, PRINTED)


def make_file_handler(path: Path, prefix: str) -> logging.Handler:
    """Return a handler for a log file, with `prefix` before the level."""
    handler = LogFile(path)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(levelname)s %(name)s: %(message)s"))
    return handler


def make_terminal_handler(
    stream: Stream, level: int, should_print: Callable[[logging.LogRecord], bool], template: str | None = None
) -> logging.Handler:
    """Return a handler for standard output or error, with a level and a filter."""
    handler = Terminal(stream)
    handler.setLevel(level)
    handler.addFilter(should_print)
    handler.setFormatter(logging.Formatter(template) if template else _OneLineFormatter())
    return handler


def log_python_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Log a Python warning; replaces `warnings.showwarning`."""
    text = warnings.formatwarning(message, category, filename, lineno, line)
    logging.getLogger("drawloom.warnings").warning("%s", text.strip())
