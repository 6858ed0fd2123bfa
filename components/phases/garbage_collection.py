"""Python's garbage collection at the same steps on all ranks, so ranks do not wait for one another."""

import gc
from typing import ClassVar

from drawloom import component, internal, setting
from drawloom.ports import Cadence, Event, EventKind, Step, describe_cadence_fault, is_due


@component(impact="safe")
class CollectGarbage:
    """Garbage collection for the young generations every few steps, in place of Python's automatic collection."""

    every: Cadence = setting(
        'steps between collections, or "last" or "never"', default=50, check=describe_cadence_fault
    )
    before_saves: bool = setting(
        "whether all ranks collect all generations before saving a checkpoint, to free the memory in "
        "reference cycles while the state is copied; takes seconds in a large process",
        default=False,
    )

    observes: ClassVar[tuple[EventKind, ...]] = ("saving_started",)

    _was_on: bool = internal(False)

    def open(self) -> None:
        """Turn automatic collection off, and collect all generations."""
        self._was_on = gc.isenabled()
        gc.disable()
        gc.collect()

    def close(self) -> None:
        """Collect all generations, and turn automatic collection on again if it was on."""
        gc.collect()
        if self._was_on:
            gc.enable()

    def run_phase(self, step: Step) -> None:
        """Collect generations 0 and 1 at `every`'s steps."""
        if is_due(self.every, step):
            gc.collect(1)  # a full collection of a large process takes seconds

    def on_event(self, event: Event) -> None:
        """Collect all generations before a checkpoint is saved; all ranks save at the same time."""
        if self.before_saves:
            gc.collect()
