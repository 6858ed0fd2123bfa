"""Checkpoints as they are found: the newest that is whole, and what it holds."""

import json
import logging
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load

from drawloom.components.checkpoint import files
from drawloom.components.checkpoint.manifest import Damaged, Manifest, read_listed, read_manifest, verify
from drawloom.components.checkpoint.state import unpack
from drawloom.graph import UserError

FOLDER = "checkpoints"
STEP = re.compile(r"step-(0|[1-9][0-9]*)")

log = logging.getLogger("drawloom.checkpoint")


def newest(run_folder: Path) -> Path | None:
    """
    The newest checkpoint of a run of which every byte is as it was committed; None if there is no checkpoint at all.

    A damaged one is named in a warning, passed over, and left as it is. Raises UserError if all are damaged.
    """
    damaged = {}
    for path in reversed(committed(run_folder / FOLDER)):
        try:
            verify(path)
            return path
        except Damaged as error:
            if not path.exists():
                return newest(run_folder)  # the run that owns the folder has just removed it
            damaged[path] = str(error)
            log.warning("%s is damaged and passed over: %s", path, error)
    if not damaged:
        return None
    lines = [f"no checkpoint in {run_folder / FOLDER} is whole:"]
    lines += [f"  {path}: {fault}" for path, fault in damaged.items()]
    raise UserError("\n".join([*lines, "put one back from a copy, or remove them all to start afresh"]))


def load_node(checkpoint: Path, node: str) -> dict[str, Any]:
    """
    The saved state of one node, rank 0's if each rank has its own.

    Raises UserError if there is none, or if it is damaged.
    """
    try:
        states = read_rank(checkpoint, read_manifest(checkpoint), 0)
    except Damaged as error:
        raise UserError(f"{checkpoint} is damaged: {error}") from error
    if node not in states:
        raise UserError(f"{checkpoint} has no state of [{node}]; it has {', '.join(states) or 'none at all'}")
    return states[node]


def committed(checkpoints: Path) -> list[Path]:
    """The folders of steps, oldest first, whole or not."""
    paths = [checkpoints / name for name in files.names(checkpoints) if STEP.fullmatch(name)]
    return sorted(paths, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was saved, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


def read_rank(checkpoint: Path, manifest: Manifest, rank: int) -> dict[str, dict[str, Any]]:
    """Node to state, of all that one rank wrote; Damaged if that is not what was committed."""
    tree = read_listed(checkpoint, manifest, f"rank-{rank}.json")
    tensors = read_listed(checkpoint, manifest, f"rank-{rank}.safetensors")
    try:
        states: dict[str, dict[str, Any]] = unpack(json.loads(tree), load(tensors))
    except (ValueError, TypeError, SafetensorError) as error:
        raise Damaged(f"rank-{rank}.json and rank-{rank}.safetensors don't belong together: {error}") from error
    return states
