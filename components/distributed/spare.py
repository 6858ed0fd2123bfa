"""A process that waits as a spare until a run's next generation admits it."""

import gc
import logging
import time
from typing import Any

import attrs
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from drawloom.components.distributed.generations import CURRENT, Generation, RunProcess, Spares
from drawloom.components.distributed.rank_monitor import MAX_WATCHED
from drawloom.graph import UserError
from drawloom.graph.problems import ReportedError

log = logging.getLogger("drawloom.distributed")


def wait_as_spare(store: Any, run: str, silence: float) -> Generation:
    """
    Wait in the launch's store until a generation of the run admits this process, and return it.

    Raises ReportedError when the run ends, and UserError if its processes send no heartbeat for `silence` seconds.
    """
    import_early_and_freeze_gc()
    spares = Spares(PrefixStore(run, store))
    number = spares.register(RunProcess.of_this_process())
    log.info("this process waits as spare %d", number)
    outcome = spares.await_admission(number, LifeSigns(store, silence))
    if outcome is None:
        raise UserError("the processes of the run, which this one was to join, send no heartbeats; start it again")
    if isinstance(outcome, int):
        raise ReportedError("the run has ended while this process waited as a spare", outcome)
    return outcome


def import_early_and_freeze_gc() -> None:
    """
    Import modules that a recovery would import, and hide all objects so far from the garbage collector.

    torch imports `torch._dynamo` with the first optimizer, which takes a second or more. A recovery's collections would
    walk through its million objects.
    """
    import torch._dynamo  # noqa: F401

    gc.freeze()


def count_heartbeats(store: Any) -> tuple[str, int]:
    """Return the name of the launch's newest generation, and the heartbeats of its first ranks so far."""
    generation = Generation.from_json(store.get(CURRENT).decode())
    beats = PrefixStore(f"drawloom/{generation.name}", store.underlying_store)
    watched = range(min(MAX_WATCHED, len(generation.members)))  # some of them may be lost
    return generation.name, sum(beats.add(f"beat/{rank}", 0) for rank in watched)


@attrs.define
class LifeSigns:
    """Check for heartbeats by the launch's newest generation, at least one in `timeout` seconds."""

    store: Any
    timeout: float
    _heard: Any = attrs.field(init=False, default=None)
    _since: float = attrs.field(init=False, factory=time.monotonic)

    def __call__(self) -> bool:
        """Return whether a watched rank has sent a heartbeat lately."""
        if (heard := count_heartbeats(self.store)) != self._heard:
            self._heard, self._since = heard, time.monotonic()
        return time.monotonic() < self._since + self.timeout
