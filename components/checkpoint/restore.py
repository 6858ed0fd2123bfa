"""Restores the nodes of a run from a checkpoint."""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from drawloom.components.checkpoint.manifest import (
    CorruptCheckpoint,
    Manifest,
    all_blocks,
    faults_of_files,
    faults_of_folder,
    read_manifest,
)
from drawloom.components.checkpoint.reader import Reader, Slices
from drawloom.components.checkpoint.snapshot import is_local, slices_of
from drawloom.components.ports.run import Stateful
from drawloom.components.storage.state_tree import entries
from drawloom.graph import UserError

log = logging.getLogger("drawloom.checkpoint")


@attrs.frozen
class LoadedCheckpoint:
    """
    The states that a rank has read, by node, and the names of all saved entries of each sharded node.

    `verified` are the blocks of each file that it has read.
    """

    checkpoint: Path
    manifest: Manifest
    states: dict[str, dict[str, Any]]
    names: dict[str, set[str]]
    verified: dict[str, list[int]]


def read_states(checkpoint: Path, states: Mapping[str, Stateful], rank: int) -> LoadedCheckpoint:
    """The states that a rank needs, of which it reads and verifies no more. Raises CorruptCheckpoint."""
    manifest = read_manifest(checkpoint)
    if faults := list(faults_of_folder(checkpoint, manifest)):
        raise CorruptCheckpoint("; ".join(faults))
    reader = Reader(checkpoint, manifest)
    wanted = {name: slices_of(node) for name, node in states.items()}

    def pick(file: int, name: str) -> Slices | bool:
        if name in manifest.local:
            return file == rank and name in wanted
        return found if (found := wanted.get(name, {})) is not None else True

    found = reader.joined(_ranks(manifest, rank), pick)
    verified = {name: sorted(blocks) for name, blocks in reader.verified.items()}
    return LoadedCheckpoint(checkpoint, manifest, found, _names(reader), verified)


def verify_rest(
    checkpoint: Path, manifest: Manifest, verified: Iterable[Mapping[str, Sequence[int]]], rank: int, size: int
) -> str:
    """
    Verify a rank's share of the blocks that no rank has read (`verified`, by rank); the faults that it finds.

    If no rank finds one, every file of the checkpoint is as committed.
    """
    known = {(name, block) for by_file in verified for name, blocks in by_file.items() for block in blocks}
    left = [
        each
        for name, blocks in all_blocks(manifest).items()
        for block in blocks
        if (each := (name, block)) not in known
    ]
    share: dict[str, list[int]] = {}
    for name, block in left[len(left) * rank // size : len(left) * (rank + 1) // size]:
        share.setdefault(name, []).append(block)
    return "; ".join(faults_of_files(checkpoint, manifest, share))


def compare(
    found: LoadedCheckpoint,
    states: Mapping[str, Stateful],
    held: Sequence[Mapping[str, list[str]]],
    changed: Collection[str],
) -> None:
    """
    Check that a checkpoint fits the nodes of the run.

    Raises UserError if it has other nodes than `states`, except for the `changed` ones, which the recipe was allowed to
    add or remove; or if a sharded node has other entries than the ranks hold in total (`held`, by rank).
    """
    manifest = found.manifest
    saved = dict.fromkeys([*manifest.replicated, *manifest.sharded], False) | dict.fromkeys(manifest.local, True)
    here = {name: is_local(node) for name, node in states.items()}
    missing = [name for name in here if saved.get(name) != here[name]]
    extra = [name for name in saved if saved[name] != here.get(name)]
    if not {*missing, *extra} <= {*changed}:
        parts = [("it has no state of", missing), ("it has a state of other nodes:", extra)]
        differences = "; ".join(f"{what} {', '.join(f'[{name}]' for name in which)}" for what, which in parts if which)
        raise UserError(f"{found.checkpoint} does not fit this run: {differences}")
    for name in missing:
        log.info("%s has no state of [%s], which the recipe added; its state is initialized", found.checkpoint, name)
    for name, there in found.names.items():
        _compare_entries(found.checkpoint, name, there, {each for names in held for each in names.get(name, [])})


def load(found: LoadedCheckpoint, states: Mapping[str, Stateful]) -> None:
    """Load the states into their nodes. A node without one (a new rank of a larger world) keeps its initial state."""
    for name, node in states.items():
        if name in found.states:
            _load(found.checkpoint, name, node, found.states[name])


def _ranks(manifest: Manifest, rank: int) -> Iterable[int]:
    """The ranks whose files this rank reads."""
    return range(manifest.world_size) if manifest.sharded else sorted({0, rank} & {*range(manifest.world_size)})


def _names(reader: Reader) -> dict[str, set[str]]:
    names: dict[str, set[str]] = {name: set() for name in reader.manifest.sharded}
    for file in range(reader.manifest.world_size) if names else ():
        tree = reader.tree(file)
        for name in names.keys() & tree.keys():
            names[name] |= entries(tree[name]).keys()
    return names


def _compare_entries(checkpoint: Path, name: str, saved: set[str], here: set[str]) -> None:
    """UserError if they differ, unless nothing was saved: an optimizer that has not stepped has no entries."""
    if not saved or saved == here:
        return
    parts = [("missing", here - saved), ("unexpected", saved - here)]
    differences = "; ".join(f"{what} {', '.join(sorted(which)[:20])}" for what, which in parts if which)
    raise _unfit(checkpoint, name, differences)


def _load(checkpoint: Path, name: str, node: Stateful, state: dict[str, Any]) -> None:
    try:
        node.load_state_dict(state)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        # torch modules raise RuntimeError; the others come from states of another structure
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        if others := list(_other_shapes(node.state_dict(), state)):
            text = "; ".join([*others[:5], *([f"and {len(others) - 5} more"] if len(others) > 5 else [])])
        raise _unfit(checkpoint, name, str(text)) from error


def _unfit(checkpoint: Path, name: str, why: str) -> UserError:
    text = f"{checkpoint}: its state of [{name}] does not fit the node: {why}"
    return UserError(f"{text}; undo what was changed, or use another run name")


def _other_shapes(here: Any, saved: Any, name: str = "") -> Iterator[str]:
    """The tensors of two states, by their names in both, whose shapes differ."""
    if isinstance(here, Tensor) and isinstance(saved, Tensor):
        if here.shape != saved.shape:
            yield f"{name} is {tuple(saved.shape)} in the checkpoint, and {tuple(here.shape)} here"
    elif isinstance(here, dict) and isinstance(saved, dict):
        for key in filter(here.__contains__, saved):
            yield from _other_shapes(here[key], saved[key], f"{name}.{key}" if name else str(key))
