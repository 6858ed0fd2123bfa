"""A progress bar on the terminal."""

import logging
import sys
import time
from collections.abc import Callable

import attrs
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import Event, Step
from drawloom.graph import component

COLUMNS = "step {task.completed:.0f}/{task.total:.0f}", "loss {task.fields[loss]}", "{task.fields[speed]} tokens/s"
BETWEEN = 0.1  # seconds between two drawings: one takes milliseconds, a small step too


@component(impact="safe")
class ProgressBar:
    """
    Step, loss, tokens by second and time to go, on the main rank and if standard output is a terminal.

    While the bar is there, step lines don't go to the terminal; warnings are printed above it. It is drawn when steps
    end, by no thread of its own.
    """

    mesh: Mesh

    clock: Callable[[], float] = attrs.field(init=False, default=time.monotonic)
    console: Console | None = attrs.field(init=False, default=None)
    _bar: Progress | None = attrs.field(init=False, default=None)
    _task: TaskID = attrs.field(init=False, default=TaskID(0))
    _drawn: float = attrs.field(init=False, default=0.0)
    _hushed: list[logging.Handler] = attrs.field(init=False, factory=list)

    def open(self) -> None:
        """Find out whether there is a terminal."""
        self.console = self.console or Console(force_terminal=sys.stdout.isatty())

    def close(self) -> None:
        """Leave the bar as it is now, and the terminal to others."""
        for handler in self._hushed:
            handler.removeFilter(_is_no_step_line)
        self._hushed = []
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_event(self, event: Event) -> None:
        """Begin with the first step, go on with each, and end with the last."""
        if event.kind == "step_started" and event.step and self._bar is None:
            self._begin(event.step)
        elif event.kind == "step_ended" and event.step:
            self._go_on(event.step)

    def _begin(self, step: Step) -> None:
        if self.console is None or not self.console.is_terminal or self.mesh.world.rank != 0:
            return
        step_column, *others = [TextColumn(text) for text in COLUMNS]
        columns = step_column, BarColumn(), *others, TimeRemainingColumn()
        self._bar = Progress(*columns, console=self.console, auto_refresh=False, get_time=self.clock)
        self._task = self._bar.add_task("", total=step.total, completed=step.index - 1, loss="-", speed="-")
        self._hushed = list(logging.getLogger("drawloom.run").handlers)  # these write step lines to the terminal
        for handler in self._hushed:
            handler.addFilter(_is_no_step_line)
        self._bar.start()

    def _go_on(self, step: Step) -> None:
        if self._bar is None:
            return
        now = self.clock()
        speed = f"{step.tokens / max(now - step.started - step.excluded_seconds, 1e-9):,.0f}"
        self._bar.update(self._task, completed=step.index, loss=_loss(step), speed=speed)
        if now - self._drawn >= BETWEEN:
            self._drawn = now
            self._bar.refresh()
        if step.last:
            self.close()


def _loss(step: Step) -> str:
    loss = step.outputs.get("loss")
    return "skipped" if step.skip_reason else "-" if loss is None else f"{float(loss):.4f}"


def _is_no_step_line(record: logging.LogRecord) -> bool:
    return not hasattr(record, "step_line")
