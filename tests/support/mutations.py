"""Mutations for the fault harnesses to detect: each removes a safeguard that only these tests check."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drawloom.components.checkpoint import commit as writing
from drawloom.components.checkpoint.checkpointer import Checkpointer
from drawloom.components.checkpoint.commit import MANIFEST, Manifest
from drawloom.components.checkpoint.snapshot import Snapshot
from drawloom.components.optim.torch_optimizer import TorchOptimizer
from drawloom.components.run.randomness import ProcessRandomness
from drawloom.components.storage import durable_files


def put(owner: Any, name: str, value: Any) -> None:
    """Replace a function or method."""
    setattr(owner, name, value)


def no_fsync() -> None:
    """Skip every fsync."""

    def nothing(_file: int, _path: Path) -> None:
        return

    put(durable_files, "_fsync_once", nothing)


def no_fsync_of_folders() -> None:
    """Fsync files, but not folders."""

    def nothing(_path: Path) -> None:
        return

    put(durable_files, "flush_to_disk", nothing)


def no_rename() -> None:
    """Write a checkpoint in place."""

    def begin(checkpoint: Path) -> None:
        durable_files.remove_file_or_folder(checkpoint)
        checkpoint.mkdir()

    def commit(_temp: Path, checkpoint: Path, manifest: Manifest) -> None:
        durable_files.create_file_with_content(checkpoint / MANIFEST, manifest.to_json_bytes())
        durable_files.flush_to_disk(checkpoint)

    def nothing(_checkpoints: Path) -> None:
        return

    put(writing, "TEMP", "")
    put(writing, "create_clean_folder", begin)
    put(writing, "commit_folder", commit)
    put(writing, "_remove_leftovers", nothing)


def expire_before_commit() -> None:
    """Remove old checkpoints before the new one is committed."""
    save = writing.CommitProtocol.save

    def early(protocol: writing.CommitProtocol, checkpoint: Path, snapshot: Snapshot) -> None:
        if protocol.group.rank == 0:
            writing.remove_checkpoints(sorted(checkpoint.parent.glob("step-*")))
        save(protocol, checkpoint, snapshot)

    put(writing.CommitProtocol, "save", early)


def manifest_first() -> None:
    """Rename a checkpoint before its folder is fsynced."""
    sync = durable_files.flush_to_disk

    def late(path: Path) -> None:
        if not path.name.startswith(writing.TEMP):
            sync(path)

    put(durable_files, "flush_to_disk", late)


def no_moments() -> None:
    """Do not restore the optimizer state."""

    def nothing(self: TorchOptimizer, state: dict[str, Any]) -> None:
        return

    put(TorchOptimizer, "load_state_dict", nothing)


def no_randomness() -> None:
    """Do not restore random generators."""

    def nothing(self: ProcessRandomness, state: dict[str, Any]) -> None:
        return

    put(ProcessRandomness, "load_state_dict", nothing)


def no_waiting_for_copies() -> None:
    """Let weights change while they are copied."""

    def nothing(self: Checkpointer) -> None:
        return

    put(Checkpointer, "wait_until_staged", nothing)


def nothing() -> None:
    """No mutation."""


MUTATIONS: Mapping[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        nothing,
        no_fsync,
        no_fsync_of_folders,
        no_rename,
        expire_before_commit,
        manifest_first,
        no_moments,
        no_randomness,
        no_waiting_for_copies,
    )
}
"""By name, to be passed to a process. They are for separate processes: nothing undoes them."""
