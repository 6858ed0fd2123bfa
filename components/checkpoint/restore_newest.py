"""Restore of the newest checkpoint that is valid on all ranks."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from drawloom.components.checkpoint.manifest import CorruptCheckpointError
from drawloom.components.checkpoint.reader import no_valid_checkpoint_error
from drawloom.components.checkpoint.restore import (
    LoadedCheckpoint,
    check_checkpoint_fits_nodes,
    load_states_into_nodes,
    read_and_verify_rank_states,
    verify_share_of_unread_blocks,
)
from drawloom.components.checkpoint.retention import Retention
from drawloom.components.checkpoint.snapshot import slices_by_sharded_entry
from drawloom.components.distributed.rank_errors import run_and_gather_on_all_ranks
from drawloom.components.ports.checkpoint import Stateful
from drawloom.components.ports.distributed import Group
from drawloom.components.storage.regular_file import read_file
from drawloom.graph import RecipeError, ResolvedRecipe
from drawloom.graph.recipe.lockfile import LOCK

MAX_RECIPE_SIZE = 2**26  # bytes

log = logging.getLogger("drawloom.checkpoint")


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
    loaded, outcomes = run_and_gather_on_all_ranks(
        world, lambda: _read_states_or_error(checkpoint, states, world.rank), to_json=_encode_read_outcome
    )
    faults = [outcome["fault"] for outcome in outcomes]
    if isinstance(loaded, LoadedCheckpoint) and not any(faults):
        verified = [outcome["verified"] for outcome in outcomes]
        rest = partial(verify_share_of_unread_blocks, checkpoint, loaded.manifest, verified, world.rank, world.size)
        _, faults = run_and_gather_on_all_ranks(world, rest, to_json=str)
    return (loaded if isinstance(loaded, LoadedCheckpoint) and not any(faults) else None), faults


def _find_nodes_with_changed_settings(recipe: ResolvedRecipe, checkpoint: Path) -> set[str]:
    """Return the nodes configured differently by the checkpoint's recipe."""
    try:
        text = read_file(checkpoint / LOCK, MAX_RECIPE_SIZE).decode()
        return {change.node for change in recipe.changes(text)}
    except (RecipeError, ValueError, OSError):
        return set()  # an unreadable recipe of an older version: the nodes must be the same


def _read_states_or_error(
    checkpoint: Path, states: Mapping[str, Stateful], rank: int
) -> LoadedCheckpoint | CorruptCheckpointError:
    """Read a rank's states; return a fault instead of raising it, because all ranks must exchange their outcomes."""
    try:
        return read_and_verify_rank_states(checkpoint, states, rank)
    except CorruptCheckpointError as error:
        return error


def _encode_read_outcome(loaded: LoadedCheckpoint | CorruptCheckpointError) -> dict[str, Any]:
    """Return this rank's fault (empty if the read succeeded) and verified blocks, as JSON for the other ranks."""
    if isinstance(loaded, CorruptCheckpointError):
        return {"fault": str(loaded), "verified": {}}
    return {"fault": "", "verified": loaded.verified}
