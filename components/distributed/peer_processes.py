"""Processes of other ranks on this machine, watched for their ends and for stops (SIGSTOP)."""

import os
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import attrs

from drawloom import internal

STOP_TICK = 0.05  # seconds between two looks for stopped processes
STOPPED_LOOKS = 6  # looks in a row at a stopped process: others may be resumed a moment later than this one


@attrs.define(eq=False)
class PeerProcesses:
    """
    Watcher for processes on this machine; `pids` are their ids by rank.

    An end makes a process's pidfd readable, which a waiting thread notices at once. Without pidfds (not Linux) nothing
    is noticed.
    """

    pids: Mapping[int, int] = attrs.field(factory=dict)
    _descriptors: dict[int, int] = internal(factory=dict)  # from pidfd to rank
    _ended: set[int] = internal(factory=set)
    _looks: Counter[int] = internal(factory=Counter)  # looks in a row at a stopped process, by rank
    _wakes: int | None = internal(None)  # event descriptor
    _closing: threading.Event = internal(factory=threading.Event)

    def open(self) -> None:
        """Open a pidfd for every process, and an event descriptor for `end_all_waits`."""
        for rank, process in self.pids.items() if hasattr(os, "pidfd_open") else ():
            try:
                self._descriptors[os.pidfd_open(process)] = rank
            except ProcessLookupError:
                self._ended.add(rank)
            except OSError:
                continue  # no descriptors are left: only missing heartbeats show the process's end
        if self._descriptors:
            with suppress(OSError):
                self._wakes = os.eventfd(0)

    def close(self) -> None:
        """Close all descriptors. No other thread waits."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = {}
        if self._wakes is not None:
            os.close(self._wakes)
            self._wakes = None

    def end_all_waits(self) -> None:
        """End a `wait_for_change` in another thread, and all later ones."""
        self._closing.set()
        if self._wakes is not None:
            os.eventfd_write(self._wakes, 1)

    def wait_for_change(self, seconds: float, *, looks_for_stops: bool) -> None:
        """Wait until a process ends, or, if `looks_for_stops`, counts as stopped; at most `seconds`."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._closing.is_set():
            if self._wait_for_end(min(left, STOP_TICK if looks_for_stops else left)):
                return
            if looks_for_stops and self.look_for_stops():
                return

    def wait_until_ended(self, ranks: Iterable[int], seconds: float) -> None:
        """Wait until the processes with these ranks have ended, at most `seconds`; other machines' are ignored."""
        end = time.monotonic() + seconds
        live = {descriptor for descriptor, rank in self._descriptors.items() if rank in {*ranks}}
        poll = select.poll()
        while live and (left := end - time.monotonic()) > 0:
            for descriptor in live:
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(1000 * left):
                poll.unregister(descriptor)
                live.discard(descriptor)

    def find_ended(self) -> set[int]:
        """Return the ranks whose processes have ended."""
        self._wait_for_end(0)
        return {*self._ended}

    def find_stopped(self) -> list[int]:
        """Return the ranks whose processes were stopped in STOPPED_LOOKS looks in a row, or more."""
        return [rank for rank, looks in self._looks.items() if looks >= STOPPED_LOOKS]

    def look_for_stops(self) -> bool:
        """Look once for stopped processes; return whether one counts as stopped from now on."""
        live = [rank for rank in self._descriptors.values() if rank not in self._ended]
        self._looks = Counter(
            {rank: self._looks[rank] + 1 for rank in live if is_process_stopped_by_signal(self.pids[rank])}
        )
        return STOPPED_LOOKS in self._looks.values()

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill processes, unless they have ended."""
        killed = {*ranks}
        for descriptor, rank in self._descriptors.items():
            if rank in killed:
                with suppress(OSError):  # it has ended
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    def _wait_for_end(self, seconds: float) -> bool:
        """Wait until a process ends; return whether one has, within `seconds`."""
        poll = select.poll()
        live = {descriptor: rank for descriptor, rank in self._descriptors.items() if rank not in self._ended}
        for descriptor in live:
            poll.register(descriptor, select.POLLIN)
        if self._wakes is None:
            self._closing.wait(seconds)
            seconds = 0
        else:
            poll.register(self._wakes, select.POLLIN)
        ended = {live[descriptor] for descriptor, _ in poll.poll(1000 * seconds) if descriptor in live}
        self._ended |= ended
        return bool(ended)


def is_process_stopped_by_signal(process: int) -> bool:
    """Return whether a process on this machine is stopped by a signal, such as SIGSTOP; False if it is gone."""
    try:
        # the name in parentheses may contain anything, even parentheses; the state follows
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except OSError:
        return False
