"""A progress bar on the terminal."""

import logging
import sys
import time
from collections.abc import Callable
from typing import ClassVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from drawloom import component, internal
from drawloom.ports import STEP_LINE, Device, Event, EventKind, Mesh, Step, is_marked

COLUMNS = "step {task.completed:.0f}/{task.total:.0f}", "{task.fields[values]}"
REFRESH_INTERVAL = 0.1  # seconds between refreshes, because a refresh takes milliseconds, as long as a small step


@component(impact="safe")
class ProgressBar:
    """
    Progress bar with step, loss, validation loss, learning rate, peak memory, speed and time left, on a terminal.

    Rank 0 shows the bar. On a GPU, loss and speed are one step late. While the bar is shown, step lines are not printed
    on the terminal, and warnings are printed above the bar. The bar is refreshed after steps, without a thread.
    """

    observes: ClassVar[tuple[EventKind, ...]] = ("step_started", "step_ended")

    mesh: Mesh
    device: Device

    clock: Callable[[], float] = internal(time.monotonic)
    console: Console | None = internal(None)
    _bar: Progress | None = internal(None)
    _task: TaskID = internal(TaskID(0))
    _refreshed: float = internal(0.0)
    _ended: Step | None = internal(None)
    _shown: Step | None = internal(None)
    _values: dict[str, str] = internal(factory=dict)
    _filtered: list[logging.Handler] = internal(factory=list)

    def open(self) -> None:
        """Create the console for the bar, which starts at the first step; detect whether it is a terminal."""
        self.console = self.console or Console(force_terminal=sys.stdout.isatty())

    def close(self) -> None:
        """Stop the bar, and show step lines again."""
        for handler in self._filtered:
            handler.removeFilter(_is_not_step_line)
        self._filtered = []
        if self._bar is not None:
            self._show_newest_values(self._bar)
            self._bar.stop()
            self._bar = None

    def on_event(self, event: Event) -> None:
        """Start the bar at the first step, update it after every step, and stop it after the last."""
        if event.kind == "step_started" and event.step and self._bar is None:
            self._start_bar(event.step)
        elif event.kind == "step_ended" and event.step:
            self._update_bar(event.step)

    def _start_bar(self, step: Step) -> None:
        """Show the bar on rank 0's terminal, and hide step lines."""
        if self.console is None or not self.console.is_terminal or self.mesh.world.rank != 0:
            return
        step_column, values = [TextColumn(text) for text in COLUMNS]
        columns = step_column, BarColumn(bar_width=20), values, TimeRemainingColumn()
        self._bar = Progress(*columns, console=self.console, auto_refresh=False, get_time=self.clock)
        self._task = self._bar.add_task("", total=step.total, completed=step.index - 1, values="")
        self._filtered = list(logging.getLogger("drawloom.run").handlers)  # these write step lines to the terminal
        for handler in self._filtered:
            handler.addFilter(_is_not_step_line)
        self._bar.start()

    def _update_bar(self, step: Step) -> None:
        """Advance the bar; at intervals also show new values."""
        if self._bar is None:
            return
        now = self.clock()
        before, self._ended = self._ended, step
        # On a GPU the host does not know this step's loss yet, and does not wait for it.
        self._shown = self._ended if step.state.is_on_host or step.is_last else before
        if "validation_loss" in step.state:
            self._values["validation_loss"] = f"val {step.state.number('validation_loss'):.4f}"
        self._bar.update(self._task, completed=step.index)
        if now - self._refreshed >= REFRESH_INTERVAL:
            self._refreshed = now
            self._show_newest_values(self._bar)
            self._bar.refresh()
        if step.is_last:
            self.close()

    def _show_newest_values(self, bar: Progress) -> None:
        """Put the newest known values into the bar's text."""
        if self._shown is not None:
            self._values |= format_loss_and_learning_rate(self._shown)
            if interval := self._shown.interval:
                self._values["speed"] = f"{self._shown.tokens / interval.training_seconds:,.0f} tokens/s"
            self._values["memory"] = f"{self.device.get_peak_memory_so_far() / 1e6:,.0f} MB"
            bar.update(self._task, values="  ".join(self._values[name] for name in ORDER if name in self._values))


ORDER = ("loss", "validation_loss", "lr", "memory", "speed")


def format_loss_and_learning_rate(step: Step) -> dict[str, str]:
    """Return a step's loss and learning rate; the bar keeps showing earlier values for missing ones."""
    state = step.state
    loss = {"loss": f"loss {state.number('loss'):.4f}"} if "loss" in state else {}
    skipped = {"loss": "loss skipped"} if step.skip_reason else {}
    rate = {"lr": f"lr {state.number('lr'):#.2g}"} if "lr" in state else {}
    return {**loss, **skipped, **rate}


def _is_not_step_line(record: logging.LogRecord) -> bool:
    """Return whether a log record is not a step line."""
    return not is_marked(record, STEP_LINE)
