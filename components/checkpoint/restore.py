"""Restores a run's nodes from a checkpoint."""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from drawloom.components.checkpoint.manifest import (
    CorruptCheckpointError,
    Manifest,
    block_numbers_by_file,
    describe_differing_blocks,
    describe_missing_and_unknown_files,
    read_manifest,
)
from drawloom.components.checkpoint.reader import CheckpointReader, Slices
from drawloom.components.checkpoint.snapshot import is_rank_local, slices_by_sharded_entry
from drawloom.components.ports.checkpoint import Stateful
from drawloom.components.storage.state_tree import list_dict_entries
from drawloom.graph import UserError

log = logging.getLogger("drawloom.checkpoint")


@attrs.frozen
class LoadedCheckpoint:
    """
    States read by a rank, by node, and all saved entry names by sharded node.

    `verified` has the rank's read blocks by file.
    """

    checkpoint: Path
    manifest: Manifest
    states: dict[str, dict[str, Any]]
    names: dict[str, set[str]]
    verified: dict[str, list[int]]


def read_and_verify_rank_states(checkpoint: Path, states: Mapping[str, Stateful], rank: int) -> LoadedCheckpoint:
    """Read and verify only a rank's own states. Raises CorruptCheckpointError."""
    manifest = read_manifest(checkpoint)
    if faults := list(describe_missing_and_unknown_files(checkpoint, manifest)):
        raise CorruptCheckpointError("; ".join(faults))
    reader = CheckpointReader(checkpoint, manifest)
    wanted = {name: slices_by_sharded_entry(node) for name, node in states.items()}

    def pick(file: int, name: str) -> Slices | bool:
        if name in manifest.local:
            return file == rank and name in wanted
        slices = wanted.get(name, {})
        return True if slices is None else slices

    loaded = reader.read_and_join_states(_ranks_to_read(manifest, rank), pick)
    verified = {name: sorted(blocks) for name, blocks in reader.verified.items()}
    return LoadedCheckpoint(checkpoint, manifest, loaded, _list_saved_entries_by_node(reader), verified)


def verify_share_of_unread_blocks(
    checkpoint: Path, manifest: Manifest, verified: Iterable[Mapping[str, Sequence[int]]], rank: int, size: int
) -> str:
    """
    Verify this rank's share of the unread blocks (`verified` has the read ones, by rank); return the faults.

    If no rank reports a fault, every checkpoint file is as committed.
    """
    known = {(name, block) for by_file in verified for name, blocks in by_file.items() for block in blocks}
    every_block = [(name, block) for name, blocks in block_numbers_by_file(manifest).items() for block in blocks]
    left = [block for block in every_block if block not in known]
    share: dict[str, list[int]] = {}
    for name, block in left[len(left) * rank // size : len(left) * (rank + 1) // size]:
        share.setdefault(name, []).append(block)
    return "; ".join(describe_differing_blocks(checkpoint, manifest, share))


def check_checkpoint_fits_nodes(
    loaded: LoadedCheckpoint,
    states: Mapping[str, Stateful],
    entries_by_rank: Sequence[Mapping[str, list[str]]],
    changed: Collection[str],
) -> None:
    """
    Check if a checkpoint fits the run's nodes.

    Raises UserError if it has other nodes than `states`, except for `changed` nodes, which the recipe may add or
    remove; or if a sharded node has other entries than all ranks together (`entries_by_rank`).
    """
    manifest = loaded.manifest
    saved = dict.fromkeys([*manifest.replicated, *manifest.sharded], False) | dict.fromkeys(manifest.local, True)
    is_local_here = {name: is_rank_local(node) for name, node in states.items()}
    missing = [name for name in is_local_here if saved.get(name) != is_local_here[name]]
    extra = [name for name in saved if saved[name] != is_local_here.get(name)]
    if not {*missing, *extra} <= {*changed}:
        parts = [("it has no state of", missing), ("it has a state of other nodes:", extra)]
        differences = "; ".join(f"{text} {', '.join(f'[{name}]' for name in names)}" for text, names in parts if names)
        raise UserError(f"{loaded.checkpoint} does not fit this run: {differences}")
    for name in missing:
        log.info("%s has no state of [%s], which the recipe added; its state is initialized", loaded.checkpoint, name)
    for name, saved_entries in loaded.names.items():
        _check_entries_are_equal(
            loaded.checkpoint,
            name,
            saved_entries,
            {entry for names in entries_by_rank for entry in names.get(name, [])},
        )


def load_states_into_nodes(loaded: LoadedCheckpoint, states: Mapping[str, Stateful]) -> None:
    """Load the states into their nodes. A node without one (a new rank of a larger world) keeps its initial state."""
    for name, node in states.items():
        if name in loaded.states:
            _load_state_into_node(loaded.checkpoint, name, node, loaded.states[name])


def _ranks_to_read(manifest: Manifest, rank: int) -> Iterable[int]:
    """Return the ranks whose files this rank reads."""
    return range(manifest.world_size) if manifest.sharded else sorted({0, rank} & {*range(manifest.world_size)})


def _list_saved_entries_by_node(reader: CheckpointReader) -> dict[str, set[str]]:
    """Return all ranks' saved entry names by sharded node."""
    names: dict[str, set[str]] = {name: set() for name in reader.manifest.sharded}
    for file in range(reader.manifest.world_size) if names else ():
        tree = reader.read_trees_by_node(file)
        for name in names.keys() & tree.keys():
            names[name] |= list_dict_entries(tree[name]).keys()
    return names


def _check_entries_are_equal(checkpoint: Path, name: str, saved: set[str], current: set[str]) -> None:
    """Raise UserError for a difference, unless nothing was saved: an optimizer has no entries before its first step."""
    if not saved or saved == current:
        return
    parts = [("missing", current - saved), ("unexpected", saved - current)]
    differences = "; ".join(f"{text} {', '.join(sorted(names)[:20])}" for text, names in parts if names)
    raise _misfit_error(checkpoint, name, differences)


def _load_state_into_node(checkpoint: Path, name: str, node: Stateful, state: dict[str, Any]) -> None:
    try:
        node.load_state_dict(state)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        # torch modules raise RuntimeError; the others come from states of another structure
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        if differences := list(_describe_shape_differences(node.state_dict(), state)):
            text = "; ".join(
                [*differences[:5], *([f"and {len(differences) - 5} more"] if len(differences) > 5 else [])]
            )
        raise _misfit_error(checkpoint, name, str(text)) from error


def _misfit_error(checkpoint: Path, name: str, reason: str) -> UserError:
    text = f"{checkpoint}: its state of [{name}] does not fit the node: {reason}"
    return UserError(f"{text}; undo what was changed, or use another run name")


def _describe_shape_differences(current: Any, saved: Any, name: str = "") -> Iterator[str]:
    """Describe the tensors with equal paths but different shapes in two states."""
    if isinstance(current, Tensor) and isinstance(saved, Tensor):
        if current.shape != saved.shape:
            yield f"{name} is {tuple(saved.shape)} in the checkpoint, and {tuple(current.shape)} here"
    elif isinstance(current, dict) and isinstance(saved, dict):
        for key in filter(current.__contains__, saved):
            yield from _describe_shape_differences(current[key], saved[key], f"{name}.{key}" if name else str(key))
