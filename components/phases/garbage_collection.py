"""Garbage collected at the same steps on all ranks, so that no rank waits for another one's."""

import gc

import attrs

from drawloom.components.ports.run import Cadence, Step, a_cadence, due
from drawloom.graph import component, setting


@component(impact="safe")
class CollectGarbage:
    """Turns automatic collection off while the run is open, and collects what is young every so many steps."""

    every: Cadence = setting(default=50, check=a_cadence, doc='steps between collections, or "last" or "never"')

    _was_on: bool = attrs.field(init=False, default=False)

    def open(self) -> None:
        """Collect everything, and nothing more by itself."""
        self._was_on = gc.isenabled()
        gc.disable()
        gc.collect()

    def close(self) -> None:
        """Collect everything, and let collection go on by itself if it did."""
        gc.collect()
        if self._was_on:
            gc.enable()

    def run_phase(self, step: Step) -> None:
        """Collect, if it is due, what was made since the last time or the one before."""
        if due(self.every, step):
            gc.collect(1)
