"""Signals that ask the run to end: it ends after the step, on all ranks."""

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

import attrs
import torch

from drawloom.components.ports.distributed import Mesh
from drawloom.graph import component

TAKEN = (signal.SIGINT, signal.SIGTERM)
NOTICE = b"\nstopping after this step; a second signal ends at once\n"


@component(change="free")
class Signals:
    """
    Takes SIGINT and SIGTERM while the run is open: the first is noted, a second one does what it did before.

    In a thread other than the main one no signal can be taken, and none is.
    """

    mesh: Mesh

    _before: dict[int, Any] = attrs.field(init=False, factory=dict)
    _noted: int = attrs.field(init=False, default=0)

    def open(self) -> None:
        """Take the signals."""
        if threading.current_thread() is threading.main_thread():
            for number in TAKEN:
                self._before[number] = signal.signal(number, self._take)

    def close(self) -> None:
        """Let signals do what they did before."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def agreed(self) -> int:
        """The largest number of a signal that any rank noted, 0 if none did; all ranks call it."""
        largest = torch.tensor(self._noted, dtype=torch.int64)
        self.mesh.world.max(largest)
        return int(largest)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self._noted:
            self.close()
            signal.raise_signal(number)
            return
        self._noted = number
        if self.mesh.world.rank == 0:
            with suppress(OSError):
                os.write(2, NOTICE)  # print and logging may be in the middle of a line
