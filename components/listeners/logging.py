"""Logging: all messages to a file per rank, step lines and warnings to the terminal of rank 0."""

import logging
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from drawloom import Every, component, internal, setting
from drawloom.ports import Event, EventKind, Mesh, Processes, RunFolder


@component(impact="safe")
class RunLogging:
    """
    Configuration for the loggers `drawloom` and `drawloom.run` and for Python's warnings while the run is open.

    On rank 0, INFO messages from `drawloom.run`, such as step lines, go to standard output, and messages at `level` or
    above to standard error. On all ranks, all messages go to `log/rank-N.log`, with the rank's host and mesh indices.
    """

    observes: ClassVar[tuple[EventKind, ...]] = ()

    folder: RunFolder
    mesh: Mesh
    launches: Every[Processes]
    level: Literal["debug", "info", "warning", "error"] = setting(
        "lowest message level on standard error", default="warning"
    )

    _added: list[tuple[logging.Logger, logging.Handler]] = internal(factory=list)
    _level_before: int = internal(logging.NOTSET)
    _show_before: Callable[..., Any] | None = internal(None)

    def open(self) -> None:
        """Open the log file, and install the handlers."""
        from drawloom.components.listeners.log_handlers import (
            describe_host_and_mesh_indices,
            is_for_stderr,
            is_for_stdout,
            log_python_warning,
            make_file_handler,
            make_terminal_handler,
            prepare_rank_log_path,
        )

        top, run = logging.getLogger("drawloom"), logging.getLogger("drawloom.run")
        # the file comes first, so that a message that fails on the terminal is in the file
        prefix = describe_host_and_mesh_indices(self.mesh, self.launches.values())
        self._add_temporary_handler(top, make_file_handler(prepare_rank_log_path(self.folder, self.mesh), prefix))
        if self.mesh.world.rank == 0:
            level = logging.getLevelNamesMapping()[self.level.upper()]
            self._add_temporary_handler(
                run, make_terminal_handler("stdout", logging.INFO, is_for_stdout, "%(message)s")
            )
            self._add_temporary_handler(top, make_terminal_handler("stderr", level, is_for_stderr))
        self._level_before, self._show_before = top.level, warnings.showwarning
        top.setLevel(logging.DEBUG)
        warnings.showwarning = log_python_warning

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
        """Do nothing: as a listener, the component is opened before the trainer's other nodes."""

    def _add_temporary_handler(self, logger: logging.Logger, handler: logging.Handler) -> None:
        """Add a handler, to be removed by `close`."""
        logger.addHandler(handler)
        self._added.append((logger, handler))
