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
REFRESH = 0.1  # seconds between two refreshes: one takes milliseconds, as long as a small step


@component(impact="safe")
class ProgressBar:
    """
    Step, loss, tokens per second and time remaining, on rank 0 if standard output is a terminal.

    On a GPU, loss and speed are those of the step before.

    While the bar is shown, step lines do not go to the terminal; warnings are printed above it. It is refreshed when
    steps end, without a thread.
    """

    mesh: Mesh

    clock: Callable[[], float] = attrs.field(init=False, default=time.monotonic)
    console: Console | None = attrs.field(init=False, default=None)
    _bar: Progress | None = attrs.field(init=False, default=None)
    _task: TaskID = attrs.field(init=False, default=TaskID(0))
    _refreshed: float = attrs.field(init=False, default=0.0)
    _newest: tuple[Step, float] | None = attrs.field(init=False, default=None)  # with its seconds
    _filtered: list[logging.Handler] = attrs.field(init=False, factory=list)

    def open(self) -> None:
        """Detect whether standard output is a terminal."""
        self.console = self.console or Console(force_terminal=sys.stdout.isatty())

    def close(self) -> None:
        """Stop the bar, and show step lines again."""
        for handler in self._filtered:
            handler.removeFilter(_is_no_step_line)
        self._filtered = []
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_event(self, event: Event) -> None:
        """Start the bar at the first step, update it after each, stop it after the last."""
        if event.kind == "step_started" and event.step and self._bar is None:
            self._start(event.step)
        elif event.kind == "step_ended" and event.step:
            self._update(event.step)

    def _start(self, step: Step) -> None:
        if self.console is None or not self.console.is_terminal or self.mesh.world.rank != 0:
            return
        step_column, *others = [TextColumn(text) for text in COLUMNS]
        columns = step_column, BarColumn(), *others, TimeRemainingColumn()
        self._bar = Progress(*columns, console=self.console, auto_refresh=False, get_time=self.clock)
        self._task = self._bar.add_task("", total=step.total, completed=step.index - 1, loss="-", speed="-")
        self._filtered = list(logging.getLogger("drawloom.run").handlers)  # these write step lines to the terminal
        for handler in self._filtered:
            handler.addFilter(_is_no_step_line)
        self._bar.start()

    def _update(self, step: Step) -> None:
        if self._bar is None:
            return
        now = self.clock()
        before, self._newest = self._newest, (step, max(now - step.started - step.excluded_seconds, 1e-9))
        self._bar.update(self._task, completed=step.index)
        # On a GPU the host does not know this step's loss yet; it is no reason to wait.
        shown = self._newest if step.settled or step.last else before
        if shown is not None:
            self._bar.update(self._task, loss=_loss(shown[0]), speed=f"{shown[0].tokens / shown[1]:,.0f}")
        if now - self._refreshed >= REFRESH:
            self._refreshed = now
            self._bar.refresh()
        if step.last:
            self.close()


def _loss(step: Step) -> str:
    step.settle()
    loss = step.outputs.get("loss")
    return "skipped" if step.skip_reason else "-" if loss is None else f"{float(loss):.4f}"


def _is_no_step_line(record: logging.LogRecord) -> bool:
    return not hasattr(record, "step_line")
