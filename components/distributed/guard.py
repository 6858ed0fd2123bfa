"""
Guard process that ends this process when its own threads can't, for example if C code keeps the GIL.

A regular expression or an extension may keep the lock forever: no other Python thread runs then, including a watchdog.
The guard is forked before torch is imported and before there are threads. It reads a limit from shared memory, and lets
the kernel deliver a signal; faulthandler then prints the stacks without the lock.

The module imports almost nothing, so it can be started first.
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
"""
Signals that a terminal or a cluster sends to every process; the guard ignores them, and the guarded process acts on
them.
"""


class Guard:
    """Time limit for this process's current work, enforced by a guard process if one was started."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._version = 0

    def fork_guard_process(self) -> None:
        """Fork the guard process; continue without a guard if no process can be made."""
        memory, parent = mmap.mmap(-1, SIZE), os.getpid()
        reading, writing = os.pipe()
        HEADER.pack_into(memory, 0, 0, UNLIMITED, 0)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # until the guard ignores them
        with suppress(OSError):
            if os.fork() == 0:
                os.close(writing)
                _kill_parent_when_overdue(parent, memory, reading)
            self._memory = memory
            faulthandler.register(DUMP_SIGNAL, all_threads=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reading)  # the other end stays open as long as this process lives

    def set_time_limit(self, seconds: float | None, text: str = "") -> None:
        """Start a limit in `seconds`, None for no limit; `text` is the message if the limit is exceeded."""
        if self._memory is None:
            return
        message = text.encode()[: SIZE - HEADER.size]
        self._version += 2
        HEADER.pack_into(self._memory, 0, self._version - 1, UNLIMITED, 0)
        self._memory[HEADER.size : HEADER.size + len(message)] = message
        limit = UNLIMITED if seconds is None else seconds
        HEADER.pack_into(self._memory, 0, self._version, limit, len(message))


guard = Guard()
"""The guard of this process."""


def _kill_parent_when_overdue(parent_pid: int, memory: mmap.mmap, pipe: int) -> None:
    """
    Poll the time limit in `memory`, and kill the parent when the time is up. Runs in the guard process.

    The guard process exits when the parent ends or closes the pipe `pipe`.
    """
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    with open(os.devnull, "r+b", buffering=0) as null:
        for descriptor in (0, 1):  # closed, so that a reader of the output sees its end when the parent exits
            os.dup2(null.fileno(), descriptor)
    version, remaining, polled = 0, UNLIMITED, time.monotonic()
    while not select.select([pipe], [], [], TICK)[0] and os.getppid() == parent_pid:
        now = time.monotonic()
        # At most two ticks count, because the machine may have slept or the process may have been stopped.
        passed, polled = min(now - polled, 2 * TICK), now
        newest, seconds, length = HEADER.unpack_from(memory)
        if newest % 2 == 0 and newest != version:
            version, remaining = newest, seconds
        elif remaining != UNLIMITED and not _is_process_stopped(parent_pid):
            remaining = max(0.0, remaining - passed)
        if remaining == 0.0 and newest == version:
            _kill_parent_and_exit(parent_pid, memory[HEADER.size : HEADER.size + length])
    os._exit(0)


def _kill_parent_and_exit(parent_pid: int, text: bytes) -> None:
    """Print the message, make the parent print its threads' stacks, kill it, and end the guard process."""
    with suppress(OSError):
        os.write(2, text + b"\n")
    with suppress(ProcessLookupError):
        os.kill(parent_pid, DUMP_SIGNAL)
        time.sleep(DUMP_SECONDS)
        os.kill(parent_pid, signal.SIGKILL)
    os._exit(0)


def _is_process_stopped(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP, a terminal or a debugger."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False
