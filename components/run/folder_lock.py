"""
One run in a folder: a lock that the operating system holds, and that dies with its holder.

The lock is flock(2) on a file that stays open. It belongs to the open file, which forked children share, so a child
closes its copy at birth: otherwise a worker that outlives a killed run would keep the folder locked.
"""

import errno
import fcntl
import json
import os
import socket
import weakref
from datetime import UTC, datetime
from pathlib import Path

from drawloom.graph import UserError

NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL}


class FolderLock:
    """Owns a folder until it is released or the process ends. Raises UserError if another process owns it."""

    def __init__(self, folder: Path) -> None:
        path = folder / "run.lock"
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(self._file, folder)
            _sign(self._file)
        except BaseException:
            self.release()
            raise
        itself = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _release(itself()))

    def release(self) -> None:
        """Let others have the folder. A second call does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _release(lock: FolderLock | None) -> None:
    if lock is not None:
        lock.release()


def _lock(file: int, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder} is in use by {_holder(file)}; wait for it, or name another run") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise UserError(
            f"{folder} lies on a file system without file locks ({error.strerror}), where a second run could spoil "
            "this one; choose a folder on another disk"
        ) from error


def _sign(file: int) -> None:
    """Write down who holds the lock, for the message of a second run."""
    holder = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(holder).encode() + b"\n", 0)


def _holder(file: int) -> str:
    try:
        holder = json.loads(os.pread(file, 4096, 0))
        return f"process {holder['pid']} on host {holder['host']} since {holder['started']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
