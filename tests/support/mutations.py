"""Faults that a harness must find: each takes something away on which nothing but the harness insists."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drawloom.components.checkpoint import commit as writing
from drawloom.components.checkpoint.checkpointer import Checkpointer
from drawloom.components.checkpoint.manifest import MANIFEST, Manifest
from drawloom.components.checkpoint.snapshot import Snapshot
from drawloom.components.optim.torch_optimizer import TorchOptimizer
from drawloom.components.run.randomness import ProcessRandomness
from drawloom.components.storage import durable_files


def put(owner: Any, name: str, value: Any) -> None:
    """Put something in the place of a function or method."""
    setattr(owner, name, value)


def no_fsync() -> None:
    """Nothing is made to last."""

    def nothing(_file: int, _path: Path) -> None:
        return

    put(durable_files, "_sync", nothing)


def no_fsync_of_folders() -> None:
    """Files last, and their names do not."""

    def nothing(_path: Path) -> None:
        return

    put(durable_files, "sync", nothing)


def no_rename() -> None:
    """A checkpoint is written in its place."""

    def begin(checkpoint: Path) -> None:
        durable_files.remove_folder(checkpoint)
        checkpoint.mkdir()

    def commit(_temp: Path, checkpoint: Path, manifest: Manifest) -> None:
        durable_files.write_file(checkpoint / MANIFEST, manifest.write())
        durable_files.sync(checkpoint)

    def nothing(_checkpoints: Path) -> None:
        return

    put(writing, "TEMP", "")
    put(writing, "begin", begin)
    put(writing, "commit", commit)
    put(writing, "_remove_leftovers", nothing)


def rotate_before_commit() -> None:
    """Room is made for a checkpoint before it is there."""
    save = writing.CommitProtocol.save

    def early(protocol: writing.CommitProtocol, checkpoint: Path, snapshot: Snapshot) -> None:
        if protocol.group.rank == 0:
            writing.discard(sorted(checkpoint.parent.glob("step-*")))
        save(protocol, checkpoint, snapshot)

    put(writing.CommitProtocol, "save", early)


def manifest_first() -> None:
    """The manifest is renamed into place although the folder that it names is not on the disk."""
    sync = durable_files.sync

    def late(path: Path) -> None:
        if not path.name.startswith(writing.TEMP):
            sync(path)

    put(durable_files, "sync", late)


def no_moments() -> None:
    """An optimizer starts anew."""

    def nothing(self: TorchOptimizer, state: dict[str, Any]) -> None:
        return

    put(TorchOptimizer, "load_state_dict", nothing)


def no_randomness() -> None:
    """Generators stand where they stood at the start."""

    def nothing(self: ProcessRandomness, state: dict[str, Any]) -> None:
        return

    put(ProcessRandomness, "load_state_dict", nothing)


def no_waiting_for_copies() -> None:
    """The weights change while they are copied."""

    def nothing(self: Checkpointer) -> None:
        return

    put(Checkpointer, "staged", nothing)


def nothing() -> None:
    """No fault."""


MUTATIONS: Mapping[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        nothing,
        no_fsync,
        no_fsync_of_folders,
        no_rename,
        rotate_before_commit,
        manifest_first,
        no_moments,
        no_randomness,
        no_waiting_for_copies,
    )
}
"""By name, so that a process can be told which. They are for processes of their own: nothing undoes them."""
