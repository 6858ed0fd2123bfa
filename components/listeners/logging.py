"""Logging: everything to a file for each rank, step lines and warnings to the terminal of rank 0."""

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any, Literal

import attrs

from drawloom.components.listeners.rank_log import rank_log
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import Event, RunFolder
from drawloom.graph import component, setting

FILE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@component(impact="safe")
class RunLogging:
    """
    Configures the loggers `drawloom` and `drawloom.run` and Python's warnings while the run is open.

    INFO messages of `drawloom.run`, such as step lines, go to standard output, messages from `level` up to standard
    error, both on rank 0 only; every message goes to `log/rank-N.log`.
    """

    folder: RunFolder
    mesh: Mesh
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
        self._add(top, _file(str(rank_log(self.folder, self.mesh))))
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
        """Do nothing: it is a listener only to be listed with the others in a trainer."""

    def _add(self, logger: logging.Logger, handler: logging.Handler) -> None:
        logger.addHandler(handler)
        self._added.append((logger, handler))


class Terminal(logging.Handler):
    """Prints to the current `sys.stdout` or `sys.stderr`, which a progress bar may replace; no tracebacks."""

    def __init__(self, stream: str) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        try:
            print(self.format(record), file=getattr(sys, self._stream), flush=True)
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
    return not is_run_line(record) and not getattr(record, "printed", False)


def _file(path: str) -> logging.Handler:
    # a lone surrogate, as in a file name, must not make logging fail
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter(FILE_FORMAT))
    return handler


def _terminal(
    stream: str, level: int, wanted: Callable[[logging.LogRecord], bool], form: str | None = None
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
