"""
A checkpoint on its way to the disk: written aside, renamed when it is whole.

After every step of it a crash, or a power cut, leaves either what was committed before or that and the new one: files
are on the disk before the manifest that names them, all names before the rename, the rename before older ones go.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from drawloom.components.checkpoint import files
from drawloom.components.checkpoint.files import Content
from drawloom.components.checkpoint.manifest import MANIFEST, Manifest
from drawloom.components.model_state.safetensors_header import layout
from drawloom.components.model_state.tensor_bytes import bytes_of
from drawloom.components.model_state.tensor_source import TensorKind

ASIDE = ".tmp-"
TRASH = ".trash-"
KEPT = ".damaged-"


def prepare(checkpoints: Path) -> None:
    """Make the folder of checkpoints last, and sweep out what a dead run left half written or half removed."""
    files.make_folder(checkpoints)
    files.sync_folder(checkpoints.parent)
    _sweep(checkpoints)


def begin(checkpoint: Path) -> Path:
    """An empty folder in which a checkpoint is written. What failed saves and rotations left is swept out."""
    _sweep(checkpoint.parent)
    aside = checkpoint.with_name(ASIDE + checkpoint.name)
    files.make_folder(aside)
    return aside


def write_rank(aside: Path, rank: int, tree: Any, tensors: Mapping[str, Tensor]) -> dict[str, Content]:
    """
    Write the states of a rank, tensor by tensor; file name to content.

    No tensor changes meanwhile. There is no second copy of them, but for one at a time that is not dense or not on
    the CPU.
    """
    text = json.dumps(tree, allow_nan=False).encode()
    json_name, tensors_name = rank_files(rank)
    return {
        json_name: files.write_file(aside / json_name, text),
        tensors_name: files.write_parts(aside / tensors_name, safetensors(tensors)),
    }


def rank_files(rank: int) -> tuple[str, str]:
    """The names of a rank's files: its tree, and its tensors."""
    return f"rank-{rank}.json", f"rank-{rank}.safetensors"


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


def safetensors(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The bytes of a safetensors file, part by part."""
    head, entries = layout({name: TensorKind(tuple(each.shape), each.dtype) for name, each in tensors.items()})
    yield memoryview(head)
    for name in entries:
        yield bytes_of(tensors[name])


def _sweep(checkpoints: Path) -> None:
    for name in files.names(checkpoints):
        if name.startswith((ASIDE, TRASH)):
            files.remove_folder(checkpoints / name)


def _free_name(checkpoint: Path) -> Path:
    taken, number = set(files.names(checkpoint.parent)), 1
    while (name := f"{KEPT}{checkpoint.name}-{number}") in taken:
        number += 1
    return checkpoint.with_name(name)
