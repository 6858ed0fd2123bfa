"""Restores a run's nodes from the newest checkpoint that is valid on all ranks."""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from drawloom import RecipeError, ResolvedRecipe, UserError
from drawloom.components.checkpoint.commit import CorruptCheckpointError, Manifest
from drawloom.components.checkpoint.reader import (
    CheckpointReader,
    Slices,
    block_numbers_by_file,
    describe_differing_blocks,
    describe_missing_and_unknown_files,
    no_valid_checkpoint_error,
    read_manifest,
)
from drawloom.components.checkpoint.saves import Retention
from drawloom.components.checkpoint.snapshot import is_rank_local, slices_by_sharded_entry
from drawloom.components.distributed.rank_errors import run_and_gather_on_all_ranks
from drawloom.components.storage.durable_files import read_file
from drawloom.components.storage.state_tree import list_dict_entries
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.ports import Group, NodeState, Stateful

log = logging.getLogger("drawloom.checkpoint")


MAX_RECIPE_SIZE = 2**26  # bytes


@attrs.frozen
class LoadedCheckpoint:
    """
    States read by a rank, by node, and all saved entry names by sharded node.

    `verified` has the rank's read blocks by file.
    """

    checkpoint: Path
    manifest: Manifest
    states: dict[str, NodeState]
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

    all_ranks = range(manifest.world_size)
    loaded = reader.read_and_join_states(all_ranks if manifest.sharded else sorted({0, rank} & {*all_ranks}), pick)
    names: dict[str, set[str]] = {name: set() for name in manifest.sharded}
    for file in all_ranks if names else ():
        tree = reader.read_trees_by_node(file)
        for name in names.keys() & tree.keys():
            names[name] |= list_dict_entries(tree[name]).keys()
    return LoadedCheckpoint(
        checkpoint, manifest, loaded, names, {name: sorted(blocks) for name, blocks in reader.verified.items()}
    )


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
        current = {entry for names in entries_by_rank for entry in names.get(name, [])}
        # nothing is saved of an optimizer before its first step, and the recipe may have removed a node
        if name in states and saved_entries and saved_entries != current:
            parts = [("missing", sorted(current - saved_entries)), ("unexpected", sorted(saved_entries - current))]
            differences = "; ".join(f"{text} {', '.join(names[:20])}" for text, names in parts if names)
            raise _misfit_error(loaded.checkpoint, name, differences)


def load_states_into_nodes(loaded: LoadedCheckpoint, states: Mapping[str, Stateful]) -> None:
    """Load the states into their nodes. A node without one (a new rank of a larger world) keeps its initial state."""
    for name in filter(loaded.states.__contains__, states):
        node, state = states[name], loaded.states[name]
        try:
            node.load_state_dict(state)
        except (KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
            # torch modules raise RuntimeError; the others come from states of another structure
            text = error.args[0] if isinstance(error, KeyError) and error.args else error
            if differences := list(_describe_shape_differences(node.state_dict(), state)):
                more = [f"and {len(differences) - 5} more"] if len(differences) > 5 else []
                text = "; ".join([*differences[:5], *more])
            raise _misfit_error(loaded.checkpoint, name, str(text)) from error


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


def read_newest_valid(
    world: Group, folder: Path, steps: Sequence[int], states: Mapping[str, Stateful], retention: Retention
) -> LoadedCheckpoint:
    """
    Return the newest checkpoint that is valid on all ranks, with this rank's states; `steps` have one, in order.

    Corrupt ones are skipped with a warning. Raises UserError if all are corrupt.
    """
    corrupt = dict[Path, str]()
    for step in reversed(steps):
        checkpoint = folder / f"step-{step}"
        loaded, faults = _read_and_collect_faults_on_all_ranks(world, checkpoint, states)
        if loaded is not None:
            retention.remember_as_valid(checkpoint, loaded.manifest.values)
            return loaded
        corrupt[checkpoint] = "; ".join(filter(None, dict.fromkeys(faults)))
        retention.remember_as_corrupt(checkpoint)
        log.warning("%s is corrupt and skipped: %s", checkpoint, corrupt[checkpoint])
    raise no_valid_checkpoint_error(folder, corrupt)


def load_checkpoint(
    world: Group, loaded: LoadedCheckpoint, states: Mapping[str, Stateful], recipe: ResolvedRecipe
) -> None:
    """Load a checkpoint into the nodes on all ranks. Raises UserError if it does not fit the recipe's nodes."""
    entries_by_rank = world.gather_json(
        {name: [*parts] for name, node in states.items() if (parts := slices_by_sharded_entry(node))}
    )
    changed = partial(_find_nodes_with_changed_settings, recipe, loaded.checkpoint)
    run_and_gather_on_all_ranks(world, lambda: check_checkpoint_fits_nodes(loaded, states, entries_by_rank, changed()))
    run_and_gather_on_all_ranks(world, lambda: load_states_into_nodes(loaded, states))
    log.info("restored %s", loaded.checkpoint)


def _read_and_collect_faults_on_all_ranks(
    world: Group, checkpoint: Path, states: Mapping[str, Stateful]
) -> tuple[LoadedCheckpoint | None, list[str]]:
    """
    Read this rank's states, and verify a checkpoint on all ranks. Returns None, and the faults, if it
    is corrupt.
    """

    def read_or_fault() -> tuple[LoadedCheckpoint | None, str]:
        # a fault is returned instead of raised, because all ranks must exchange their outcomes
        try:
            return read_and_verify_rank_states(checkpoint, states, world.rank), ""
        except CorruptCheckpointError as error:
            return None, str(error)

    (loaded, _), outcomes = run_and_gather_on_all_ranks(
        world, read_or_fault, to_json=lambda outcome: [outcome[1], outcome[0].verified if outcome[0] else {}]
    )
    faults = [fault for fault, _ in outcomes]
    if loaded is not None and not any(faults):
        verified = [blocks for _, blocks in outcomes]
        rest = partial(verify_share_of_unread_blocks, checkpoint, loaded.manifest, verified, world.rank, world.size)
        _, faults = run_and_gather_on_all_ranks(world, rest, to_json=str)
    return (None if any(faults) else loaded), faults


def _find_nodes_with_changed_settings(recipe: ResolvedRecipe, checkpoint: Path) -> set[str]:
    """Return the nodes configured differently by the checkpoint's recipe."""
    try:
        text = read_file(checkpoint / LOCK, MAX_RECIPE_SIZE).decode()
        return {change.node for change in recipe.changes(text)}
    except (RecipeError, ValueError, OSError):
        return set()  # an unreadable recipe of an older version: the nodes must be the same
