"""
The first failure of any rank ends all of them, and is told once.

A failure lies in a store of torch, where each process looks every quarter of a second. Whoever is first to put one
there tells it on its terminal; the others end without a word. A process that does not come out of what it is at is
ended as it stands: a collective of gloo can't be interrupted from another thread, and for one of NCCL the host waits
nowhere that could. A process that is killed puts nothing there; others of its machine see that it is gone, by
descriptors that the system makes readable then (pidfd).
"""

import json
import logging
import math
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import attrs
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from drawloom.components.distributed.rank_errors import Agreed
from drawloom.components.distributed.torchrun import write_error_file
from drawloom.graph import UserError

T = TypeVar("T")


def connect(address: str, port: int, name: str, seconds: float) -> Any:
    """The store of the processes that were started together, by a connection of its own; `name` is this start's."""
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    return PrefixStore(f"drawloom/{name}", store)


def within(seconds: float, work: Callable[[], T]) -> T | None:
    """What `work` gives, which asks a store; None if the store is gone, or does not answer in this time."""
    found: list[T] = []

    def ask() -> None:
        try:
            found.append(work())
        except RuntimeError:  # torch's errors of stores and of the network
            return

    thread = threading.Thread(target=ask, name="store", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


log = logging.getLogger("drawloom.distributed")

MERCY = 3.0  # seconds in which a process may close what it has open, once a rank has failed
PATIENCE = 1.0  # seconds for the store to answer, and for a rank to tell what another one knows of it


@attrs.frozen
class Failure:
    """The rank that tells it, what it tells, and the exit code of all ranks."""

    teller: int
    text: str
    exit_code: int = 1


def claim(store: Any, failure: Failure) -> Failure:
    """The first failure that was put into a store: this one, if there was none."""
    kept = store.compare_set("failure", "", json.dumps(attrs.asdict(failure)))
    return Failure(**json.loads(kept))


@attrs.define(eq=False)
class Alarm:
    """
    The failure of processes that were started together, as one of them sees it.

    `store` holds it; `peers` are the other processes of this machine, by rank.
    """

    rank: int
    store: Any
    peers: Mapping[int, int] = attrs.field(factory=dict)
    error_file: str = ""
    failure: Failure | None = None
    exit: Callable[[int], object] = os._exit

    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    _deadline: float = attrs.field(init=False, default=math.inf)
    _watched: dict[int, int] = attrs.field(init=False, factory=dict)

    def open(self) -> None:
        """Watch the peers; where the system has no descriptors of processes, nobody sees that one is gone."""
        for rank, process in self.peers.items() if hasattr(os, "pidfd_open") else ():
            with suppress(OSError):
                self._watched[os.pidfd_open(process)] = rank

    def close(self) -> None:
        """Watch nobody, and end no process any more."""
        self._deadline = math.inf
        while self._watched:
            os.close(self._watched.popitem()[0])

    def leave(self) -> None:
        """Say that this process is about to end as it should."""
        within(PATIENCE, lambda: self.store.set(f"left/{self.rank}", b"1"))

    def ring(self, text: str, exit_code: int = 1, trace: str = "") -> Failure:
        """This rank fails: tell it, unless another one was first, and let all others end. The first failure of all."""
        mine = Failure(self.rank, text, exit_code)
        with self._lock:
            is_first = self.failure is None
            failure = self.failure or within(PATIENCE, lambda: claim(self.store, mine)) or mine
            self._settle(failure)
        if log.hasHandlers():
            log.error("%s", f"{trace}{text}", extra={"told": True})
        if is_first and failure == mine:
            print(f"{trace}{text}", file=sys.stderr, flush=True)
        return failure

    def ring_for(self, error: Exception, place: str) -> Failure:
        """The same for an exception at a place. A rank that knows more of it than this one has time to be first."""
        if isinstance(error, Agreed) and error.rank != self.rank:
            self._await(PATIENCE)
        if isinstance(error, UserError):
            return self.ring(self._said(error, place), error.exit_code)
        return self.ring(self._said(error, place), trace="".join(traceback.format_exception(error)))

    def look(self) -> None:
        """See whether a rank has failed, or is gone. Raises RuntimeError if the store is gone."""
        if self.failure is None and self.store.check(["failure"]):
            failure = Failure(**json.loads(self.store.get("failure")))
            with self._lock:
                self._settle(failure)
            log.info("%s; rank %d ends because of it", failure.text, self.rank)
        for rank in [] if self.failure else self._gone():
            self.ring(f"rank {rank} (process {self.peers[rank]}) is gone: it was killed, or it crashed")

    def expire(self) -> None:
        """End this process, if it should have ended by now because of a failure."""
        if self.failure and time.monotonic() > self._deadline:
            self.exit(self.failure.exit_code)

    def _settle(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure, self._deadline = failure, time.monotonic() + MERCY
            write_error_file(self.error_file, failure.text, is_cause=failure.teller == self.rank)

    def _gone(self) -> list[int]:
        """The ranks of this machine that have ended without having said so."""
        poll = select.poll()
        for descriptor in self._watched:
            poll.register(descriptor, select.POLLIN)
        ranks = [self._watched[descriptor] for descriptor, _ in poll.poll(0)]
        return [rank for rank in ranks if not self.store.check([f"left/{rank}"])]

    def _await(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.failure is None and time.monotonic() < end:
            time.sleep(0.02)

    def _said(self, error: Exception, place: str) -> str:
        """What a person needs to know: who, where, and why; all ranks are at fault together if they agreed."""
        who = "" if isinstance(error, Agreed) else f"rank {self.rank}"
        what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        where = ", ".join(filter(None, [who, place]))
        return f"{where}: {what}" if where else what
