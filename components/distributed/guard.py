"""
A process beside this one that ends it when its own threads can't, as while C code holds the interpreter's lock (GIL).

A regular expression or an extension may hold the lock for ever: no other Python thread runs then, and so neither does
a watchdog. The guard is forked before torch is imported and before there are threads. It reads a limit from memory that
both share, and has the kernel deliver a signal, for which faulthandler prints the stacks without the lock.

The module imports next to nothing, so that it can be started first.
"""

import faulthandler
import mmap
import os
import select
import signal
import struct
import time
from contextlib import suppress

HEADER = struct.Struct("=QdH")  # a version, odd while it is written; the seconds that are left, or -1; bytes of text
SIZE = 4096
TICK = 0.5  # seconds between two polls
DUMP_SIGNAL = signal.SIGURG  # nothing else uses it, and it is ignored by default
DUMP_SECONDS = 1.0  # for the kernel to deliver the signal, and for the stacks to be printed
UNLIMITED = -1.0

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a terminal or a cluster sends to every process, and that the guard's own process acts on."""


class Guard:
    """The limit of what this process is doing, which its guard enforces; without a guard nothing reads it."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._version = 0

    def start(self) -> None:
        """Fork the guard, unless no process can be made: then there is none."""
        memory, parent = mmap.mmap(-1, SIZE), os.getpid()
        reading, writing = os.pipe()
        HEADER.pack_into(memory, 0, 0, UNLIMITED, 0)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # until the guard ignores them
        with suppress(OSError):
            if os.fork() == 0:
                os.close(writing)
                _watch(parent, memory, reading)
            self._memory = memory
            faulthandler.register(DUMP_SIGNAL, all_threads=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reading)  # the other end stays open as long as this process lives

    def allow(self, seconds: float | None, text: str = "") -> None:
        """Start a limit of this many seconds, None for no limit; `text` is the message if it is exceeded."""
        if self._memory is None:
            return
        words = text.encode()[: SIZE - HEADER.size]
        self._version += 2
        HEADER.pack_into(self._memory, 0, self._version - 1, UNLIMITED, 0)
        self._memory[HEADER.size : HEADER.size + len(words)] = words
        left = UNLIMITED if seconds is None else seconds
        HEADER.pack_into(self._memory, 0, self._version, left, len(words))


guard = Guard()
"""The guard of this process."""


def _watch(parent: int, memory: mmap.mmap, reading: int) -> None:
    """Poll the limit until the parent ends, in the guard's process, which then ends itself."""
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    with open(os.devnull, "r+b", buffering=0) as null:
        for number in (0, 1):  # a reader of the output must see its end
            os.dup2(null.fileno(), number)
    version, left, polled = 0, UNLIMITED, time.monotonic()
    while not select.select([reading], [], [], TICK)[0] and os.getppid() == parent:
        now = time.monotonic()
        # Of a machine that slept, and of a process that was stopped, at most two ticks count.
        passed, polled = min(now - polled, 2 * TICK), now
        newest, seconds, length = HEADER.unpack_from(memory)
        if newest % 2 == 0 and newest != version:
            version, left = newest, seconds
        elif left != UNLIMITED and not _is_stopped(parent):
            left = max(0.0, left - passed)
        if left == 0.0 and newest == version:
            _end(parent, memory[HEADER.size : HEADER.size + length])
    os._exit(0)


def _end(parent: int, text: bytes) -> None:
    """Print the message and the stacks of the parent's threads, and kill it."""
    with suppress(OSError):
        os.write(2, text + b"\n")
    with suppress(ProcessLookupError):
        os.kill(parent, DUMP_SIGNAL)
        time.sleep(DUMP_SECONDS)
        os.kill(parent, signal.SIGKILL)
    os._exit(0)


def _is_stopped(process: int) -> bool:
    """Whether a process is stopped by SIGSTOP, a terminal or a debugger."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False
