"""The terminal's bar for `listeners.progress`."""

import logging
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from drawloom.ports import STEP_LINE, Device, Step, is_marked

COLUMNS = "step {task.completed:.0f}/{task.total:.0f}", "{task.fields[values]}"
REFRESH_INTERVAL = 0.1  # seconds between refreshes, because a refresh takes milliseconds, as long as a small step
ORDER = ("loss", "validation_loss", "lr", "memory", "speed")


class TerminalBar:
    """Bar in place of the step lines on a terminal, from its first step on."""

    def __init__(self, console: Console, first: Step, device: Device, clock: Callable[[], float]) -> None:
        self._device, self._clock = device, clock
        self._refreshed = 0.0
        self._ended: Step | None = None
        self._shown: Step | None = None
        self._values: dict[str, str] = {}
        step_column, values = [TextColumn(text) for text in COLUMNS]
        columns = step_column, BarColumn(bar_width=20), values, TimeRemainingColumn()
        self._bar = Progress(*columns, console=console, auto_refresh=False, get_time=clock)
        self._task = self._bar.add_task("", total=first.total, completed=first.index - 1, values="")
        self._filtered = list(logging.getLogger("drawloom.run").handlers)  # these write step lines to the terminal
        for handler in self._filtered:
            handler.addFilter(_is_not_step_line)
        self._bar.start()

    def update(self, step: Step) -> None:
        """Advance the bar; at intervals also show new values."""
        now = self._clock()
        before, self._ended = self._ended, step
        # On a GPU the host does not know this step's loss yet, and does not wait for it.
        self._shown = self._ended if step.state.is_on_host or step.is_last else before
        if "validation_loss" in step.state:
            self._values["validation_loss"] = f"val {step.state.number('validation_loss'):.4f}"
        self._bar.update(self._task, completed=step.index)
        if now - self._refreshed >= REFRESH_INTERVAL:
            self._refreshed = now
            self._show_newest_values()
            self._bar.refresh()

    def stop(self) -> None:
        """Leave the newest values on the terminal, and show step lines again."""
        for handler in self._filtered:
            handler.removeFilter(_is_not_step_line)
        self._show_newest_values()
        self._bar.stop()

    def _show_newest_values(self) -> None:
        """Put the newest known values into the bar's text."""
        if self._shown is not None:
            self._values |= format_loss_and_learning_rate(self._shown)
            if interval := self._shown.interval:
                self._values["speed"] = f"{self._shown.tokens / interval.training_seconds:,.0f} tokens/s"
            self._values["memory"] = f"{self._device.get_peak_memory_so_far() / 1e6:,.0f} MB"
            values = "  ".join(self._values[name] for name in ORDER if name in self._values)
            self._bar.update(self._task, values=values)


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
