"""The folders left by a crash at any system call of some saves, and the step restored from each."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attrs

from drawloom.components.checkpoint.commit import CorruptCheckpointError
from drawloom.components.checkpoint.reader import verify_checkpoint
from drawloom.components.checkpoint.staging.blocking import Blocking
from drawloom.graph import UserError
from support.checkpoints import restore_step, save_steps
from support.disk import Shadow, kill_at, watch_calls
from support.mutations import MUTATIONS

LOST = -1  # a checkpoint that can't be restored, or that has the state of another step


@attrs.frozen
class Remains:
    """
    The committed step, the restored step, and the folder's names after a crash.

    `torn` is whether an invalid folder had the name of a step.
    """

    committed: int
    restored: int
    left: tuple[str, ...]
    torn: bool


def save_two(folder: Path, staging: bool, committed: Callable[[int], None]) -> None:
    """Save steps 3 and 4, keeping two checkpoints; call `committed` after each."""
    for step in (3, 4):
        save_steps(folder, step, keep=2, staging=Blocking() if staging else None)
        committed(step)


def kill_everywhere(base: Path, staging: bool, mutation: str = "nothing") -> list[Remains]:
    """Kill a process with two saves and retention at each of its calls in turn; runs in a separate process."""
    MUTATIONS[mutation]()
    save_steps(base / "good", 1, 2, keep=2)
    remains_by_call: list[Remains] = []
    while True:
        folder, note = base / "run", base / "committed"
        shutil.copytree(base / "good", folder)
        note.write_bytes(b"\x02")
        child = os.fork()
        if child == 0:
            with watch_calls(kill_at(len(remains_by_call) + 1, half=len(remains_by_call) % 2 == 1)):
                save_two(folder, staging, partial(_note, note))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        remains_by_call.append(remains(folder, note.read_bytes()[0]))
        shutil.rmtree(folder)
        if not os.WIFSIGNALED(status):
            return remains_by_call


def cut_everywhere(base: Path, mutation: str = "nothing") -> list[Remains]:
    """Cut the power after each call, for each folder a cut could leave; runs in a separate process."""
    MUTATIONS[mutation]()
    save_steps(base / "good", 1, 2, keep=2)
    folder = base / "run"
    shutil.copytree(base / "good", folder)
    shadow, remains_by_cut, committed = Shadow(folder), list[Remains](), [2]

    def done(call: object) -> None:
        shadow.done(call)  # type: ignore[arg-type]
        for number in range(shadow.cuts()):
            left_folders.append(base / f"cut-{len(left_folders)}")
            shadow.leave(left_folders[-1], number)
            commits.append(committed[0])

    left_folders: list[Path] = []
    commits: list[int] = []
    with watch_calls(lambda _: None, done):
        save_two(folder, False, lambda step: committed.__setitem__(0, step))
    for left_folder, step in zip(left_folders, commits, strict=True):
        remains_by_cut.append(remains(left_folder, step))
        shutil.rmtree(left_folder)
    return remains_by_cut


def _note(path: Path, step: int) -> None:
    file = os.open(path, os.O_WRONLY)
    os.pwrite(file, bytes([step]), 0)
    os.close(file)


def remains(folder: Path, committed: int) -> Remains:
    """Return the remains of a folder in which this step was committed."""
    torn = not all(map(is_valid, (folder / "checkpoints").glob("step-*")))
    try:
        step = restore_step(folder)
    except (UserError, ValueError, OSError):
        step = LOST
    return Remains(committed, step, tuple(sorted(os.listdir(folder / "checkpoints"))), torn)


def is_valid(checkpoint: Path) -> bool:
    """Whether every byte is as committed."""
    try:
        verify_checkpoint(checkpoint)
    except CorruptCheckpointError:
        return False
    return True
