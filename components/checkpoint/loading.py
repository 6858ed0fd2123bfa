"""A checkpoint into the nodes of a run."""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from drawloom.components.checkpoint.manifest import Damaged, Manifest, read_manifest
from drawloom.components.checkpoint.reading import read_rank
from drawloom.components.ports.run import Stateful
from drawloom.graph import UserError

log = logging.getLogger("drawloom.checkpoint")


def is_local(node: Stateful) -> bool:
    """Whether each rank has a state of its own."""
    return bool(getattr(node, "state_is_local", False))


def load_states(checkpoint: Path, states: Mapping[str, Stateful], rank: int, changed: Collection[str]) -> None:
    """
    Load what a checkpoint holds for a rank. A rank that had no state of its own then keeps the one that it has.

    Raises UserError if it is damaged, if a node refuses its state, or if its nodes are not those of `states`, except
    for the `changed` ones: the recipe was allowed to add and remove them.
    """
    try:
        manifest = read_manifest(checkpoint)
        saved = _read(checkpoint, manifest, rank)
    except Damaged as error:
        raise UserError(f"{checkpoint} was whole a moment ago, and now is damaged: {error}") from error
    _compare(checkpoint, manifest, states, changed)
    for name in states:
        if name in saved:
            _load(checkpoint, name, states[name], saved[name])


def _read(checkpoint: Path, manifest: Manifest, rank: int) -> dict[str, dict[str, Any]]:
    """Node to state, for one rank."""
    main = read_rank(checkpoint, manifest, 0)
    own = main if rank == 0 else read_rank(checkpoint, manifest, rank) if rank < manifest.world_size else {}
    return {name: main[name] for name in manifest.replicated} | {name: own[name] for name in manifest.local if own}


def _compare(checkpoint: Path, manifest: Manifest, states: Mapping[str, Stateful], changed: Collection[str]) -> None:
    saved = dict.fromkeys(manifest.replicated, False) | dict.fromkeys(manifest.local, True)
    here = {name: is_local(node) for name, node in states.items()}
    missing = [name for name in here if saved.get(name) != here[name]]
    extra = [name for name in saved if saved[name] != here.get(name)]
    if {*missing, *extra} <= {*changed}:
        for name in missing:
            log.info("%s has no state of [%s], which the recipe added; it starts afresh", checkpoint, name)
        return
    parts = [("it has no state of", missing), ("it has state of what is no such node here:", extra)]
    told = "; ".join(f"{what} {', '.join(f'[{name}]' for name in which)}" for what, which in parts if which)
    raise UserError(f"{checkpoint} does not fit this run: {told}")


def _load(checkpoint: Path, name: str, node: Stateful, state: dict[str, Any]) -> None:
    try:
        node.load_state_dict(state)
    except (KeyError, ValueError, RuntimeError) as error:  # modules of torch say so with a RuntimeError
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise UserError(f"{checkpoint}: its state of [{name}] does not fit the node: {text}") from error
