"""
The lock of a run folder: one run at a time.

It is flock(2) on a file that stays open. The lock belongs to the open file description, which forked
children share; a child closes its copy after the fork, or a worker that outlives a killed run would hold the lock.
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

# what flock returns on file systems without locks, such as some network mounts
NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL}


class FolderLock:
    """Locks a folder until it is released or the process ends. Raises UserError if another process has locked it."""

    def __init__(self, folder: Path) -> None:
        path = folder / "run.lock"
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(self._file, folder)
            _write_holder(self._file)
        except BaseException:
            self.release()
            raise
        itself = weakref.ref(self)  # at-fork hooks can't be removed: a strong reference would leak the lock
        os.register_at_fork(after_in_child=lambda: _release(itself()))

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
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
        raise UserError(f"{folder} is in use by {_holder(file)}; wait for it, or use another run name") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise UserError(
            f"{folder} is on a file system without file locks ({error.strerror}), where a second run could corrupt "
            "this one; choose a folder on another disk"
        ) from error


def _write_holder(file: int) -> None:
    """Write the holder of the lock to its file, for the error message of a second run."""
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
