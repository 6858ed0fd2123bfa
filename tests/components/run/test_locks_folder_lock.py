"""The lock of a run folder."""

import errno
import fcntl
import json
import os
import signal
import socket
import stat
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.run.locks import FolderLock
from drawloom.graph import UserError
from support.processes import run_ranks


def _try(folder: Path) -> str:
    try:
        FolderLock(folder).release()
    except UserError as error:
        return str(error)
    return "free"


def _outlive_a_killed_holder(folder: Path) -> tuple[bool, str]:
    """Fork a holder with a worker, kill the holder, and try the lock while the worker lives."""
    reading, writing = os.pipe()
    holder = os.fork()
    if holder == 0:
        lock = FolderLock(folder)
        if os.fork() == 0:
            os.write(writing, str(os.getpid()).encode())  # the worker: its copy of the lock is closed by now
        time.sleep(60)
        lock.release()
    worker = int(os.read(reading, 100))
    is_locked = "in use" in _try(folder)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    os.kill(worker, 0)  # it lives
    return is_locked, _try(folder)


def test_two_runs_in_one_folder_second_is_refused(tmp_path: Path) -> None:
    """The error has the holder's process, host and start time; after release the second run succeeds."""
    lock = FolderLock(tmp_path)
    [text] = run_ranks(_try, 1, tmp_path)
    assert text.startswith(f"{tmp_path} is in use by process {os.getpid()} on host {socket.gethostname()} since ")
    started = datetime.fromisoformat(json.loads((tmp_path / "run.lock").read_text())["started"])
    assert timedelta(0) <= datetime.now(UTC) - started < timedelta(seconds=60)
    lock.release()
    assert run_ranks(_try, 1, tmp_path) == ["free"]


def test_removing_the_lock_file_lets_no_second_run_in(tmp_path: Path) -> None:
    """The folder itself is locked."""
    lock = FolderLock(tmp_path)
    (tmp_path / "run.lock").unlink()
    assert run_ranks(_try, 1, tmp_path) == [
        f"{tmp_path} is in use by another process; wait for it, or use another run name"
    ]
    lock.release()


def test_a_lock_needs_only_file_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS refuses to lock a folder open for reading; the file's lock still refuses a second run."""
    flock = fcntl.flock

    def lock_or_fail(descriptor: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_or_fail)
    lock = FolderLock(tmp_path)
    assert "is in use" in _try(tmp_path)
    lock.release()


def test_the_lock_ends_with_its_holder_though_a_worker_survives(tmp_path: Path) -> None:
    """kill -9 releases the lock, though a forked child of the holder still runs."""
    assert run_ranks(_outlive_a_killed_holder, 1, tmp_path) == [(True, "free")]


def _race(folder: Path, rounds: int) -> list[int]:
    """Processes try the lock at the same moment, round after round; how many get it in each round."""
    winners = []
    for _ in range(rounds):
        start, go = os.pipe()
        reading, writing = os.pipe()
        children = []
        for _ in range(3):
            children.append(os.fork())
            if not children[-1]:
                os.close(go)
                os.read(start, 1)  # until all are there, which closes the other end
                try:
                    lock = FolderLock(folder)
                    os.write(writing, b"1")
                    time.sleep(60)
                    lock.release()
                except UserError:
                    os.write(writing, b"0")
                os._exit(0)
        os.close(go)
        answers = b""
        while len(answers) < len(children):
            answers += os.read(reading, 10)
        winners.append(answers.count(b"1"))
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for end in (start, reading, writing):
            os.close(end)
    return winners


def test_of_many_simultaneous_runs_exactly_one_gets_the_lock(tmp_path: Path) -> None:
    """In every round one process gets the lock, also right after the last holder was killed."""
    assert run_ranks(_race, 1, tmp_path, 25) == [[1] * 25]


def test_a_stale_lock_file_does_not_block(tmp_path: Path) -> None:
    """Only the lock counts, not the file, whether its text is long or no JSON."""
    (tmp_path / "run.lock").write_text("x" * 5000)
    lock = FolderLock(tmp_path)
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    (tmp_path / "run.lock").write_text("not json")
    assert f"{tmp_path} is in use by another process" in _try(tmp_path)
    lock.release()
    lock.release()
    assert _try(tmp_path) == "free"


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """The run never continues without a lock; no file is left open."""

    def flock(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match="without file locks"):
        FolderLock(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_full_disk_is_reported_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a descriptor names no file by itself; the folder is free again."""

    def pwrite(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", pwrite)
        with pytest.raises(UserError) as caught:
            FolderLock(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'run.lock'} can't be written (No space left on device); ")
    assert _try(tmp_path) == "free"
