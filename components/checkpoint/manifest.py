"""
Checkpoint manifest, written last and verified first.

It lists every file with its size and block digests (SHA-256), and contains its own checksum.
"""

import json
import re
from pathlib import Path

import attrs

from drawloom.components.storage.durable_files import FileDigest, list_folder
from drawloom.components.storage.strict_json import hash_canonical

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
        return json.dumps({**content, "digest": hash_canonical(content)}, indent=1).encode() + b"\n"

    @property
    def total_file_bytes(self) -> int:
        """Total file size."""
        return sum(content.size for content in self.files.values())


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Return all committed checkpoint folders, valid or not, ordered by step."""
    return sorted(
        (checkpoints / name for name in list_folder(checkpoints) if STEP.fullmatch(name)), key=step_of_checkpoint
    )


def step_of_checkpoint(checkpoint: Path) -> int:
    """Return a checkpoint's step, from its name."""
    return int(checkpoint.name.removeprefix("step-"))
