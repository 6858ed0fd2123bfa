"""
A checkpoint on its way to the disk: written aside, renamed when it is whole.

After every step of it a crash, or a power cut, leaves either what was committed before or that and the new one: files
are on the disk before the manifest that names them, all names before the rename, the rename before older ones go.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from drawloom.components.checkpoint.manifest import MANIFEST, Manifest
from drawloom.components.checkpoint.threads import map_parallel
from drawloom.components.storage import durable_files
from drawloom.components.storage.durable_files import Content
from drawloom.components.storage.safetensors.header import layout
from drawloom.components.storage.tensor_bytes import bytes_of
from drawloom.components.storage.tensor_source import TensorSpec

ASIDE = ".tmp-"
TRASH = ".trash-"
KEPT = ".damaged-"

SHARD = 2**28  # bytes of tensors in a file
WRITERS = 2  # files that are written at a time: what keeps a disk busy while digests are computed


def prepare(checkpoints: Path) -> None:
    """Make the folder of checkpoints last, and sweep out what a dead run left half written or half removed."""
    durable_files.make_folder(checkpoints)
    durable_files.sync_folder(checkpoints.parent)
    _sweep(checkpoints)


def begin(checkpoint: Path) -> Path:
    """An empty folder in which a checkpoint is written. What failed saves and rotations left is swept out."""
    _sweep(checkpoint.parent)
    aside = checkpoint.with_name(ASIDE + checkpoint.name)
    durable_files.make_folder(aside)
    return aside


def write_rank(aside: Path, rank: int, tree: Any, tensors: Mapping[str, Tensor]) -> dict[str, Content]:
    """
    Write the states of a rank, tensor by tensor; file name to content.

    No tensor changes meanwhile. There is no second copy of them, but for those that are not dense or not on the CPU,
    one at a time in each of the files that are written side by side.
    """
    tree_name = tree_file(rank)
    contents = {tree_name: durable_files.write_file(aside / tree_name, json.dumps(tree, allow_nan=False).encode())}
    shards = split(tensors)
    names = [tensors_file(rank, number) for number in range(len(shards))]
    works = [partial(_write_shard, aside / name, shard) for name, shard in zip(names, shards, strict=True)]
    return contents | dict(zip(names, map_parallel("writer", works, WRITERS), strict=True))


def tree_file(rank: int) -> str:
    """The name of the file that says where each tensor of a rank belongs."""
    return f"rank-{rank}.json"


def tensors_file(rank: int, number: int = 0) -> str:
    """The name of a file of a rank's tensors."""
    return f"rank-{rank}-{number}.safetensors" if number else f"rank-{rank}.safetensors"


def split(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors in files of about the same size, so that they are written and read side by side; at least one file."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def commit(checkpoint: Path, manifest: Manifest) -> None:
    """Turn what was written aside into the checkpoint. A damaged one in its place is kept under another name."""
    aside = checkpoint.with_name(ASIDE + checkpoint.name)
    durable_files.write_file(aside / MANIFEST, manifest.write())
    durable_files.sync_folder(aside)
    if checkpoint.exists():
        durable_files.rename(checkpoint, _free_name(checkpoint))
    durable_files.rename(aside, checkpoint)
    durable_files.sync_folder(checkpoint.parent)


def discard(checkpoints: Iterable[Path]) -> None:
    """Remove checkpoints; a crash leaves of each all or nothing under its name."""
    for checkpoint in checkpoints:
        trash = checkpoint.with_name(TRASH + checkpoint.name)
        durable_files.remove_folder(trash)
        durable_files.rename(checkpoint, trash)
        durable_files.sync_folder(checkpoint.parent)
        durable_files.remove_folder(trash)


def _write_shard(path: Path, tensors: Mapping[str, Tensor]) -> Content:
    return durable_files.write_parts(path, safetensors(tensors))


def safetensors(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The bytes of a safetensors file, part by part."""
    head, entries = layout({name: TensorSpec(tuple(each.shape), each.dtype) for name, each in tensors.items()})
    yield memoryview(head)
    for name in entries:
        yield bytes_of(tensors[name])


def _sweep(checkpoints: Path) -> None:
    for name in durable_files.names(checkpoints):
        if name.startswith((ASIDE, TRASH)):
            durable_files.remove_folder(checkpoints / name)


def _free_name(checkpoint: Path) -> Path:
    taken, number = set(durable_files.names(checkpoint.parent)), 1
    while (name := f"{KEPT}{checkpoint.name}-{number}") in taken:
        number += 1
    return checkpoint.with_name(name)
