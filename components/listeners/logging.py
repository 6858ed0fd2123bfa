"""Logging: everything to a file for each rank, step lines and warnings to the terminal of rank 0."""

import logging
import os
import warnings
from collections.abc import Callable, Iterable
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any, ClassVar, Literal, TextIO

import attrs

from drawloom.components.ports.distributed import Mesh, Processes
from drawloom.components.ports.log_records import PRINTED, is_marked
from drawloom.components.ports.run import Event, EventKind, RunFolder
from drawloom.components.storage.regular_file import make_folder, open_to_append
from drawloom.graph import Every, UserError, component, setting
from drawloom.graph.cli.terminal import Stream, print_text

log = logging.getLogger("drawloom.run")


def rank_log(folder: RunFolder, mesh: Mesh) -> Path:
    """`log/rank-N.log` in the run folder; makes the folder `log`. A UserError if that is a link or a file."""
    return make_folder(folder.folder / "log") / f"rank-{mesh.world.rank}.log"


def coordinates(mesh: Mesh, launches: Iterable[Processes]) -> str:
    """This rank's host and its place along each dimension, of those that are several; empty for a single process."""
    sizes = mesh.sizes.dense()
    places = [f"host {each.node_rank}" for each in launches if each.node_count > 1]
    places += [f"{name} {index}" for name, index in mesh.indices.dense().items() if sizes[name] > 1]
    return f"[{', '.join(places)}] " if places else ""


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


@component(impact="safe")
class RunLogging:
    """
    Configures the loggers `drawloom` and `drawloom.run` and Python's warnings while the run is open.

    INFO messages of `drawloom.run`, such as step lines, go to standard output, messages from `level` up to standard
    error, both on rank 0 only; every message goes to `log/rank-N.log`, with the rank's host and place in the mesh.
    """

    observes: ClassVar[tuple[EventKind, ...]] = ()

    folder: RunFolder
    mesh: Mesh
    launches: Every[Processes]
    level: Literal["debug", "info", "warning", "error"] = setting(
        default="warning", doc="lowest level of messages on standard error"
    )

    _added: list[tuple[logging.Logger, logging.Handler]] = attrs.field(init=False, factory=list)
    _level_before: int = attrs.field(init=False, default=logging.NOTSET)
    _show_before: Callable[..., Any] | None = attrs.field(init=False, default=None)

    def open(self) -> None:
        """Open the log file, and install the handlers."""
        top, run = logging.getLogger("drawloom"), logging.getLogger("drawloom.run")
        # the file first: a message that fails on the terminal is in the file
        self._add(top, _file(rank_log(self.folder, self.mesh), coordinates(self.mesh, self.launches.values())))
        if self.mesh.world.rank == 0:
            self._add(run, _terminal("stdout", logging.INFO, is_run_line, "%(message)s"))
            self._add(top, _terminal("stderr", logging.getLevelNamesMapping()[self.level.upper()], is_not_run_line))
        self._level_before, self._show_before = top.level, warnings.showwarning
        top.setLevel(logging.DEBUG)
        warnings.showwarning = _log_warning

    def close(self) -> None:
        """Remove the handlers, and restore the level and warnings."""
        if self._show_before is not None:
            warnings.showwarning, self._show_before = self._show_before, None
            logging.getLogger("drawloom").setLevel(self._level_before)
        while self._added:
            logger, handler = self._added.pop()
            logger.removeHandler(handler)
            handler.close()

    def on_event(self, event: Event) -> None:
        """Not called: this is a listener only to be listed with the others in a trainer."""

    def _add(self, logger: logging.Logger, handler: logging.Handler) -> None:
        logger.addHandler(handler)
        self._added.append((logger, handler))


class Terminal(logging.Handler):
    """Prints to the current `sys.stdout` or `sys.stderr`, which a progress bar may replace; no tracebacks."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message. If standard output fails, one warning says so, and the run continues."""
        try:
            print_text(self.format(record), self._stream)
        except (BrokenPipeError, UserError) as error:
            why = "the reader of standard output has closed it" if isinstance(error, BrokenPipeError) else error
            log.warning("%s; step lines are not printed any more, and the run continues", why)
        except Exception:
            self.handleError(record)


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {record.getMessage()}"


def is_run_line(record: logging.LogRecord) -> bool:
    """Whether a record is a run line, for standard output: INFO of `drawloom.run`."""
    return record.name == "drawloom.run" and record.levelno == logging.INFO


def is_not_run_line(record: logging.LogRecord) -> bool:
    """Whether a record is not a run line, and has not been printed by other means."""
    return not is_run_line(record) and not is_marked(record, PRINTED)


def _file(path: Path, where: str) -> logging.Handler:
    handler = LogFile(path)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {where}%(levelname)s %(name)s: %(message)s"))
    return handler


def _terminal(
    stream: Stream, level: int, wanted: Callable[[logging.LogRecord], bool], form: str | None = None
) -> logging.Handler:
    handler = Terminal(stream)
    handler.setLevel(level)
    handler.addFilter(wanted)
    handler.setFormatter(logging.Formatter(form) if form else _OneLine())
    return handler


def _log_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    text = warnings.formatwarning(message, category, filename, lineno, line)
    logging.getLogger("drawloom.warnings").warning("%s", text.strip())
