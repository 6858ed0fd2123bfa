"""A progress bar on the terminal."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from drawloom import component, internal
from drawloom.ports import Device, Event, EventKind, Mesh

if TYPE_CHECKING:
    from rich.console import Console

    from drawloom.components.listeners.terminal_bar import TerminalBar


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
    console: "Console | None" = internal(None)
    _bar: "TerminalBar | None" = internal(None)

    def open(self) -> None:
        """Create the console for the bar, which starts at the first step; detect whether it is a terminal."""
        from rich.console import Console

        self.console = self.console or Console(force_terminal=sys.stdout.isatty())

    def close(self) -> None:
        """Stop the bar, and show step lines again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_event(self, event: Event) -> None:
        """Start the bar at the first step, update it after every step, and stop it after the last."""
        if event.step is None or self.console is None or not self.console.is_terminal or self.mesh.world.rank != 0:
            return
        if event.kind == "step_started" and self._bar is None:
            from drawloom.components.listeners.terminal_bar import TerminalBar

            self._bar = TerminalBar(self.console, event.step, self.device, self.clock)
        elif event.kind == "step_ended" and self._bar is not None:
            self._bar.update(event.step)
            if event.step.is_last:
                self.close()
