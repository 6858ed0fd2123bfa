"""
Run folder lock: one run at a time.

The lock is flock(2) on the folder and on a file in it, and both stay open. The lock on the folder survives the removal
of the file; the file lock serves network file systems, which can't lock folders. A lock belongs to the open file
description, shared with forked children. A child closes its copy after the fork: otherwise a worker would keep a killed
run's lock.
"""

import errno
import fcntl
import json
import os
import socket
import weakref
from datetime import UTC, datetime
from pathlib import Path

from drawloom import UserError
from drawloom.components.storage.durable_files import open_to_append

# Errors of flock on file systems without locks, such as some network mounts. NFS returns EBADF for a folder, because
# a folder can't be opened for writing (flock(2), "NFS details").
NO_LOCKS = {errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL}


class FolderLock:
    """A lock on a folder until its release or the end of the process."""

    def __init__(self, folder: Path) -> None:
        """Lock the folder. Raises UserError if another process has locked it."""
        self._open = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
        try:
            self._open.append(open_to_append(folder / "run.lock"))
            directory, file = self._open
            _lock_folder(directory, file, folder)
            _write_lock_holder(file, folder / "run.lock")
        except BaseException:
            self.release()
            raise
        itself = weakref.ref(self)  # at-fork hooks can't be removed: a strong reference would leak the lock
        os.register_at_fork(after_in_child=lambda: _release_if_held(itself()))

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        while self._open:
            os.close(self._open.pop())


def _release_if_held(lock: FolderLock | None) -> None:
    if lock is not None:
        lock.release()


def _lock_folder(directory: int, file: int, folder: Path) -> None:
    """Lock the folder, if its file system can, and the file in it. Raises UserError."""
    try:
        _lock_file_if_supported(directory)
        reason = _lock_file_if_supported(file)
    except BlockingIOError:
        raise UserError(
            f"{folder} is in use by {_read_lock_holder(file)}; wait for it, or use another run name"
        ) from None
    if reason:
        raise UserError(
            f"{folder} is on a file system without file locks ({reason}), where a second run could corrupt "
            "this one; choose a folder on another disk"
        )


def _lock_file_if_supported(descriptor: int) -> str:
    """
    Lock an open file, and return the reason if its file system has no locks, else "".

    Raises BlockingIOError if another process has locked it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return os.strerror(error.errno)
    return ""


def _write_lock_holder(file: int, path: Path) -> None:
    """Write this process's host and id to the lock file, for the error message of a second run. Raises UserError."""
    holder = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(holder).encode() + b"\n", 0)
    except OSError as error:  # raised for a descriptor, so without a path
        raise UserError(f"{path} can't be written ({error.strerror}); free some space, or use another disk") from error


def _read_lock_holder(file: int) -> str:
    try:
        holder = json.loads(os.pread(file, 4096, 0))
        return f"process {holder['pid']} on host {holder['host']} since {holder['started']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def is_lock_holder_alive(folder: Path) -> bool:
    """Return whether the process that last locked a run folder still exists; True if it is on another host."""
    # Locking the folder would be exact, and would refuse a run that starts at this moment.
    try:
        holder = json.loads((folder / "run.lock").read_text("utf-8"))
        if holder["host"] != socket.gethostname():
            return True
        os.kill(int(holder["pid"]), 0)
    except PermissionError:  # of another user's process
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True
