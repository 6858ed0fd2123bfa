"""
A checkpoint on its way to the disk: written aside, renamed when it is whole.

After every step of it a crash, or a power cut, leaves either what was committed before or that and the new one: files
are on the disk before the manifest that names them, all names before the rename, the rename before older ones go.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save

from drawloom.components.checkpoint import files
from drawloom.components.checkpoint.files import Content
from drawloom.components.checkpoint.manifest import MANIFEST, Manifest
from drawloom.components.checkpoint.state import pack

ASIDE = ".tmp-"
TRASH = ".trash-"
KEPT = ".damaged-"


def prepare(checkpoints: Path) -> None:
    """Make the folder of checkpoints last, and sweep out what a dead run left half written or half removed."""
    files.make_folder(checkpoints)
    files.sync_folder(checkpoints.parent)
    for name in files.names(checkpoints):
        if name.startswith((ASIDE, TRASH)):
            files.remove_folder(checkpoints / name)


def begin(checkpoint: Path) -> Path:
    """An empty folder in which a checkpoint is written."""
    aside = checkpoint.with_name(ASIDE + checkpoint.name)
    files.remove_folder(aside)
    files.make_folder(aside)
    return aside


def write_rank(aside: Path, rank: int, states: Mapping[str, Any]) -> dict[str, Content]:
    """Write the states of a rank; file name to content."""
    tree, tensors = pack(states)
    texts = {
        f"rank-{rank}.json": json.dumps(tree, allow_nan=False).encode(),
        f"rank-{rank}.safetensors": save(tensors),
    }
    return {name: files.write_file(aside / name, text) for name, text in texts.items()}


def commit(checkpoint: Path, manifest: Manifest) -> None:
    """Turn what was written aside into the checkpoint. A damaged one in its place is kept under another name."""
    aside = checkpoint.with_name(ASIDE + checkpoint.name)
    files.write_file(aside / MANIFEST, manifest.write())
    files.sync_folder(aside)
    if checkpoint.exists():
        files.rename(checkpoint, _free_name(checkpoint))
    files.rename(aside, checkpoint)
    files.sync_folder(checkpoint.parent)


def discard(checkpoints: Iterable[Path]) -> None:
    """Remove checkpoints; a crash leaves of each all or nothing under its name."""
    for checkpoint in checkpoints:
        trash = checkpoint.with_name(TRASH + checkpoint.name)
        files.remove_folder(trash)
        files.rename(checkpoint, trash)
        files.sync_folder(checkpoint.parent)
        files.remove_folder(trash)


def _free_name(checkpoint: Path) -> Path:
    taken, number = set(files.names(checkpoint.parent)), 1
    while (name := f"{KEPT}{checkpoint.name}-{number}") in taken:
        number += 1
    return checkpoint.with_name(name)
