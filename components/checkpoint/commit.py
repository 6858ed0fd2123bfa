"""
Commit protocol: a checkpoint is written under a temporary name, and renamed when all ranks have written.

A crash or a power cut at any system call leaves the earlier checkpoints, with or without the new one: files are fsynced
before the manifest that lists them, everything before the rename, and the rename before expired checkpoints are
removed. The manifest is verified first: it has every file's size and block digests (SHA-256), and its own checksum.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from drawloom import ResolvedRecipe, UserError
from drawloom.components.checkpoint.snapshot import ShardPlan, Snapshot
from drawloom.components.distributed.rank_errors import run_and_gather_on_all_ranks, run_on_rank0
from drawloom.components.distributed.threads import map_parallel
from drawloom.components.storage import durable_files
from drawloom.components.storage.durable_files import FileDigest, create_folder_unless_link, list_folder
from drawloom.components.storage.safetensors.writer import write_safetensors_file
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.ports import Group

FOLDER = "checkpoints"
STEP = re.compile(r"step-(0|[1-9][0-9]*)")
FORMAT = 3
MANIFEST = "manifest.json"


class CorruptCheckpointError(Exception):
    """A checkpoint that differs from its committed content; the message has the files and their faults."""


@attrs.frozen
class Manifest:
    """
    Checkpoint content: step, recipe hash, rank count, and all files.

    `replicated` names the nodes with equal state on all ranks, saved by rank 0, `local` the nodes with separate states
    by rank, and `sharded` the nodes with entries sharded over ranks. `values` are the step's metrics, such as the
    loss, from which retention chooses the best; None for a value that is not finite.
    """

    step: int
    recipe: str
    world_size: int
    replicated: list[str]
    local: list[str]
    files: dict[str, FileDigest]
    sharded: list[str] = attrs.field(factory=list)
    values: dict[str, float | None] = attrs.field(factory=dict)

    def to_json_bytes(self) -> bytes:
        """Return the text for `manifest.json`."""
        content = {"format": FORMAT, **attrs.asdict(self)}
        return json.dumps({**content, "digest": hash_manifest(content)}, indent=1).encode() + b"\n"

    @property
    def total_file_bytes(self) -> int:
        """Total file size."""
        return sum(content.size for content in self.files.values())


def hash_manifest(content: dict[str, Any]) -> str:
    """Return a manifest's hexadecimal SHA-256, independent from formatting and key order."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Return all committed checkpoint folders, valid or not, ordered by step."""
    return sorted(
        (checkpoints / name for name in list_folder(checkpoints) if STEP.fullmatch(name)), key=step_of_checkpoint
    )


def step_of_checkpoint(checkpoint: Path) -> int:
    """Return a checkpoint's step, from its name."""
    return int(checkpoint.name.removeprefix("step-"))


TEMP = ".tmp-"  # being written
TRASH = ".trash-"  # being removed
CORRUPT = ".damaged-"  # kept for inspection

SHARD = 2**28  # bytes of tensors per file
WRITERS = 2  # files to write in parallel, which keeps a disk busy while hashes are computed


@attrs.frozen
class CommitProtocol:
    """
    Checkpoint writer: every rank writes its part, then rank 0 the recipe and the manifest.

    Every rank calls `save` for the same checkpoints in the same order. It may run in a background thread, so
    nothing else may use `group`.
    """

    group: Group
    plan: ShardPlan
    recipe: ResolvedRecipe

    def save(self, checkpoint: Path, snapshot: Snapshot) -> None:
        """
        Write and commit a checkpoint.

        Raises RankError on every rank if an I/O error occurs on any rank; earlier checkpoints are unchanged.
        """
        temp = checkpoint.with_name(TEMP + checkpoint.name)
        rank = self.group.rank
        try:
            run_on_rank0(self.group, lambda: create_clean_folder(temp))
            _, written = run_and_gather_on_all_ranks(
                self.group,
                lambda: write_files_of_rank(temp, rank, snapshot),
                to_json=lambda files: files,
            )
            run_on_rank0(self.group, lambda: self._merge_and_commit(temp, checkpoint, snapshot, written))
        except UserError:
            if rank == 0:
                with suppress(OSError):  # the next save or start removes the rest
                    durable_files.remove_file_or_folder(temp)
            raise

    def _merge_and_commit(
        self, temp: Path, checkpoint: Path, snapshot: Snapshot, written: list[dict[str, Any]]
    ) -> None:
        files = {name: FileDigest(**content) for by_name in written for name, content in by_name.items()}
        files[LOCK] = durable_files.create_file_with_content(temp / LOCK, self.recipe.lock.encode())
        manifest = Manifest(
            step=step_of_checkpoint(checkpoint),
            recipe=self.recipe.hash,
            world_size=self.group.size,
            replicated=self.plan.replicated,
            local=self.plan.local,
            sharded=list(self.plan.sharded),
            values=snapshot.values,
            files=files,
        )
        commit_folder(temp, checkpoint, manifest)


def create_checkpoints_folder(checkpoints: Path) -> None:
    """Create the checkpoint folder, and remove a killed run's leftovers."""
    create_folder_unless_link(checkpoints)
    durable_files.flush_to_disk(checkpoints.parent)
    _remove_leftovers(checkpoints)


def create_clean_folder(temp: Path) -> None:
    """Create an empty folder for a checkpoint, and remove leftovers from failed saves and removals."""
    _remove_leftovers(temp.parent)
    temp.mkdir(exist_ok=True)


def write_files_of_rank(temp: Path, rank: int, snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """
    Write a rank's part, after waiting for the copies; return FileDigest fields by file name, as JSON.

    The snapshot's tensors (any shape, dtype and device) are unchanged until the function returns. A tensor is copied
    only if it is not contiguous or not on the CPU, one at a time in each of the WRITERS threads.
    """
    tensors = snapshot.tensors.result() if isinstance(snapshot.tensors, Future) else snapshot.tensors
    shards = split_tensors_into_files(rank, tensors)
    # lists the tensors of each file, so that readers need not open all files
    tree = {"tensors": {name: [*shard] for name, shard in shards.items()}, "state": snapshot.tree}
    text = json.dumps(tree, allow_nan=False)
    contents = {
        tree_file_name(rank): durable_files.create_file_with_content(temp / tree_file_name(rank), text.encode())
    }
    jobs = [partial(write_safetensors_file, temp / name, shard) for name, shard in shards.items()]
    contents |= zip(shards, map_parallel("writer", jobs, WRITERS), strict=True)
    return {name: attrs.asdict(content) for name, content in contents.items()}


def tree_file_name(rank: int) -> str:
    """Return the file name for a rank's tree, which also lists the tensors in its other files."""
    return f"rank-{rank}.json"


def split_tensors_into_files(rank: int, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """
    Group tensors, any shape and dtype, into files with about SHARD bytes; return the tensors by file, by
    name.

    There is at least one file. Files are written and read in parallel.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    names = [f"rank-{rank}.safetensors", *(f"rank-{rank}-{number}.safetensors" for number in range(1, len(shards)))]
    return dict(zip(names, shards, strict=True))


def commit_folder(temp: Path, checkpoint: Path, manifest: Manifest) -> None:
    """Write the manifest, and rename the folder. A corrupt checkpoint for the same step is kept under another name."""
    durable_files.create_file_with_content(temp / MANIFEST, manifest.to_json_bytes())
    durable_files.flush_to_disk(temp)
    if os.path.lexists(checkpoint):
        durable_files.rename_durably(checkpoint, _choose_path_for_corrupt(checkpoint))
    durable_files.rename_durably(temp, checkpoint)


def remove_checkpoints(checkpoints: Iterable[Path]) -> None:
    """Remove checkpoints. After a crash every checkpoint is complete, or has no valid name."""
    for checkpoint in checkpoints:
        trash = checkpoint.with_name(TRASH + checkpoint.name)
        durable_files.remove_file_or_folder(trash)
        # renamed first, because a half-removed folder would look like a corrupt checkpoint
        durable_files.rename_durably(checkpoint, trash)
        durable_files.remove_file_or_folder(trash)


def _remove_leftovers(checkpoints: Path) -> None:
    """Remove temporary folders from killed saves and interrupted removals."""
    for name in durable_files.list_folder(checkpoints):
        if name.startswith((TEMP, TRASH)):
            durable_files.remove_file_or_folder(checkpoints / name)


def _choose_path_for_corrupt(checkpoint: Path) -> Path:
    """Return an unused name beside a corrupt checkpoint, to keep it there."""
    used_names, number = set(durable_files.list_folder(checkpoint.parent)), 1
    while (name := f"{CORRUPT}{checkpoint.name}-{number}") in used_names:
        number += 1
    return checkpoint.with_name(name)
