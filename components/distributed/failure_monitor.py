"""
The first failure of any rank ends every rank, and is printed once.

The failure is one key of a torch store, which each process polls every quarter of a second. The first rank to set it
prints it; the others end silently. A process that is still busy when its grace period is over is killed: a gloo
collective can't be interrupted from another thread, and with NCCL no host thread waits where it could be. A process
that is killed sets no key; the other processes of its machine notice its death by a pidfd, which becomes readable then.
"""

import json
import logging
import math
import os
import select
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import attrs
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from drawloom.components.distributed.error_file import write_error_file
from drawloom.components.distributed.rank_errors import Agreed
from drawloom.components.ports.log_records import PRINTED
from drawloom.graph import UserError
from drawloom.graph.cli.terminal import print_text

T = TypeVar("T")


def connect(address: str, port: int, name: str, seconds: float) -> Any:
    """A new connection to the store of this launch; `name` is its key prefix, unique to the launch."""
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    return PrefixStore(f"drawloom/{name}", store)


def call_with_timeout(seconds: float, request: Callable[[], T]) -> T | None:
    """The result of `request`, a call to a store; None if the store is gone or does not answer in time."""
    found: list[T] = []

    def ask() -> None:
        try:
            found.append(request())
        except RuntimeError:  # torch's errors of stores and of the network
            return

    # a store call can't be cancelled: a daemon thread may stay blocked in it without keeping the process alive
    thread = threading.Thread(target=ask, name="store", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


log = logging.getLogger("drawloom.distributed")

GRACE = 3.0  # seconds that a process has to close what it has open, after a rank has failed
STORE_TIMEOUT = 1.0  # seconds for the store to answer, and for a better informed rank to report first


@attrs.frozen
class Failure:
    """The rank that reported the failure, its message, and the exit code of all ranks."""

    reporter: int
    text: str
    exit_code: int = 1


def claim(store: Any, failure: Failure) -> Failure:
    """Set the failure in the store unless one is set already; the one that is set then."""
    # compare_set is atomic: of ranks that fail at the same moment, exactly one reads its own value back
    kept = store.compare_set("failure", "", json.dumps(attrs.asdict(failure)))
    return Failure(**json.loads(kept))


@attrs.define(eq=False)
class FailureMonitor:
    """
    Reports this rank's failure to the other ranks of the launch, and learns of theirs.

    `store` is shared by all ranks; `peers` are the process ids of the other ranks on this machine, by rank, and `where`
    says which it is, if there are several.
    """

    rank: int
    store: Any
    peers: Mapping[int, int] = attrs.field(factory=dict)
    error_file: str = ""
    where: str = ""
    failure: Failure | None = None
    exit: Callable[[int], object] = os._exit

    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    _deadline: float = attrs.field(init=False, default=math.inf)
    _watched: dict[int, int] = attrs.field(init=False, factory=dict)  # from pidfd to rank

    def open(self) -> None:
        """Watch the peers' processes; without pidfds (not Linux) a peer's death is not noticed."""
        for rank, process in self.peers.items() if hasattr(os, "pidfd_open") else ():
            with suppress(OSError):
                self._watched[os.pidfd_open(process)] = rank

    def close(self) -> None:
        """Watch no process, and kill this one no longer."""
        self._deadline = math.inf
        while self._watched:
            os.close(self._watched.popitem()[0])

    def announce_exit(self) -> None:
        """Announce that this process is about to end normally, so that its peers don't report its death."""
        call_with_timeout(STORE_TIMEOUT, lambda: self.store.set(f"exiting/{self.rank}", b"1"))

    def report(self, text: str, exit_code: int = 1, trace: str = "") -> Failure:
        """Report this rank's failure to all ranks, and print it if it is the first; the first failure."""
        mine = Failure(self.rank, text, exit_code)
        with self._lock:
            is_first = self.failure is None
            failure = self.failure or call_with_timeout(STORE_TIMEOUT, lambda: claim(self.store, mine)) or mine
            self._record(failure)
        if log.hasHandlers():
            log.error("%s", f"{trace}{text}", extra={PRINTED: True})
        if is_first and failure == mine:
            print_text(f"{trace}{text}", "stderr")
        return failure

    def report_exception(self, error: Exception, location: str) -> Failure:
        """Report an exception that was raised at this location; the first failure."""
        if isinstance(error, Agreed) and error.rank != self.rank:
            # the rank that raised it has the traceback
            self._wait_for_failure(STORE_TIMEOUT)
        if isinstance(error, UserError):
            return self.report(self._message(error, location), error.exit_code)
        return self.report(self._message(error, location), trace="".join(traceback.format_exception(error)))

    def poll(self) -> None:
        """Check whether a rank has failed or died. Raises RuntimeError if the store is gone."""
        if self.failure is None and self.store.check(["failure"]):
            failure = Failure(**json.loads(self.store.get("failure")))
            with self._lock:
                self._record(failure)
            log.info("%s; rank %d ends because of it", failure.text, self.rank)
        for rank in [] if self.failure else self._dead_peers():
            self.report(f"rank {rank} (process {self.peers[rank]}{self.where}) is gone: it was killed, or it crashed")

    def exit_if_overdue(self) -> None:
        """Kill this process if a rank has failed and the grace period is over."""
        if self.failure and time.monotonic() > self._deadline:
            self.exit(self.failure.exit_code)

    def _record(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure, self._deadline = failure, time.monotonic() + GRACE
            write_error_file(self.error_file, failure.text, is_cause=failure.reporter == self.rank)

    def _dead_peers(self) -> list[int]:
        """The ranks of this machine that have ended without announcing it."""
        poll = select.poll()
        for descriptor in self._watched:
            poll.register(descriptor, select.POLLIN)
        ranks = [self._watched[descriptor] for descriptor, _ in poll.poll(0)]
        return [rank for rank in ranks if not self.store.check([f"exiting/{rank}"])]

    def _wait_for_failure(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.failure is None and time.monotonic() < end:
            time.sleep(0.02)

    def _message(self, error: Exception, location: str) -> str:
        """`rank, location: error`, without the rank if all ranks raised the error together."""
        rank = "" if isinstance(error, Agreed) else f"rank {self.rank}"
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        prefix = ", ".join(filter(None, [rank, location]))
        return f"{prefix}: {text}" if prefix else text
