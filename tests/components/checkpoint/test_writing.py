"""What a crash, at any system call of a save, leaves behind."""

import errno
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.ports.run import Step
from drawloom.graph import UserError
from support.checkpoints import Memory, checkpointer, restored, save_steps, state_of
from support.processes import run_ranks

CALLS = ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir")


@contextmanager
def _watched(seen: Callable[[str, Any], None]) -> Iterator[None]:
    """Call `seen` with name and first argument before each system call that changes the file system."""

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            if name != "open" or arguments[1] & (os.O_WRONLY | os.O_CREAT):
                seen(name, arguments)
            return call(*arguments, **named)

        return watched

    before = {name: getattr(os, name) for name in CALLS}
    try:
        for name, call in before.items():
            setattr(os, name, wrap(name, call))
        yield
    finally:
        for name, call in before.items():
            setattr(os, name, call)


def _kill_at(number: int, half: bool) -> Callable[[str, Any], None]:
    """Kills this process at its n-th system call; `half` does half of a write first."""
    count = 0

    def seen(name: str, arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            if half and name == "write":
                os.pwrite(arguments[0], arguments[1][: len(arguments[1]) // 2], 0)
            os.kill(os.getpid(), signal.SIGKILL)

    return seen


def _killed(folder: Path, number: int) -> bool:
    """Save steps 3 and 4 in a process that is killed at its n-th system call; whether it was."""
    child = os.fork()
    if child == 0:
        with _watched(_kill_at(number, half=number % 2 == 0)):
            save_steps(folder, 3, 4, keep=2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def _kill_everywhere(base: Path) -> tuple[list[int], list[list[str]]]:
    """For each system call in turn: the step that is restored after a kill there, and then what is in the folder."""
    save_steps(base / "good", 1, 2, keep=2)
    steps: list[int] = []
    left: list[list[str]] = []
    while True:
        folder = base / "run"
        shutil.copytree(base / "good", folder)
        killed = _killed(folder, len(steps) + 1)
        steps.append(restored(folder))
        left.append(sorted(os.listdir(folder / "checkpoints")))
        shutil.rmtree(folder)
        if not killed:
            return steps, left


def test_a_kill_at_any_moment_loses_no_committed_step(tmp_path: Path) -> None:
    """At each system call of two saves with rotation a process is killed: what was committed is found, and no less."""
    [(steps, left)] = run_ranks(_kill_everywhere, 1, tmp_path)
    assert len(steps) > 40
    assert steps == sorted(steps)  # once a step was committed, no later kill takes it back
    assert {*steps} == {2, 3, 4}
    assert all(count > 10 for step, count in Counter(steps).items() if step < 4)
    for names in left:
        assert all(name.startswith("step-") for name in names)  # the next start swept the rest
        assert 2 <= len(names) <= 3


def test_every_byte_is_on_the_disk_before_it_is_relied_on(tmp_path: Path) -> None:
    """
    Each file is fsynced after its last write, the folder after its last file, and both before the rename; the parent
    after the rename and before anything older is removed. A kill can't show this, only a power cut.
    """
    save_steps(tmp_path, 1)
    order: list[tuple[str, str]] = []

    def seen(name: str, arguments: Any) -> None:
        first = arguments[0]
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
        order.append((name, os.path.relpath(path, tmp_path / "checkpoints")))

    with _watched(seen):
        save_steps(tmp_path, 2, keep=1)
    aside, renamed = ".tmp-step-2", order.index(("rename", ".tmp-step-2"))
    written = {path for name, path in order[:renamed] if name == "open" and path.startswith(aside)}
    assert len(written) == 4
    for path in written:
        assert [name for name, each in order[:renamed] if each == path] == ["open", "write", "fsync"]
    opened = [path for name, path in order[:renamed] if name == "open"]
    assert opened[-1] == f"{aside}/manifest.json"
    assert order[renamed - 1] == ("fsync", aside)
    assert order[renamed + 1] == ("fsync", ".")
    assert order[renamed + 2] == ("rename", "step-1")
    assert order[renamed + 3] == ("fsync", ".")
    assert not [name for name, _ in order[: renamed + 4] if name in ("unlink", "rmdir")]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failing_system_call_is_a_step_that_is_not_committed(tmp_path: Path, code: int) -> None:
    """At each call of a save the disk fails once: an error with the path, and before the rename no step and no rest."""
    save_steps(tmp_path / "good", 1, 2)
    errors = []
    for number in range(1, 100):
        folder = tmp_path / f"run-{number}"
        shutil.copytree(tmp_path / "good", folder)
        error, failed = _fail_once(folder, number, code)
        if not failed:
            break
        assert f"{folder}/checkpoints" in error
        assert os.strerror(code) in error
        committed = (folder / "checkpoints" / "step-3").exists()
        assert restored(folder) == (3 if committed else 2)
        assert len(os.listdir(folder / "checkpoints")) == (3 if committed else 2)
        errors.append(committed)
    assert errors == [False] * (len(errors) - 1) + [True]  # the last call makes the new name last
    assert len(errors) > 12


def _fail_once(folder: Path, number: int, code: int) -> tuple[str, bool]:
    """Save step 3 with one failing call; the words of the error, and whether there was such a call."""
    node = checkpointer(folder, {"memory": Memory(state_of(3))})
    count = 0

    def seen(name: str, arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            path = [] if isinstance(arguments[0], int) else [str(arguments[0])]
            raise OSError(code, os.strerror(code), *path)

    try:
        with _watched(seen):
            node.save(Step(3, 3))
    except UserError as error:
        return str(error), True
    return "", count >= number
