"""Checkpoints as they are found: the newest that is whole, and what it holds."""

import logging
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from drawloom.components.checkpoint.commit import tensors_file, tree_file
from drawloom.components.checkpoint.manifest import (
    MANIFEST,
    READERS,
    Damaged,
    Manifest,
    difference,
    read_manifest,
    verify,
)
from drawloom.components.checkpoint.threads import side_by_side
from drawloom.components.storage import durable_files
from drawloom.components.storage.safetensors.header import BadHeader, header_length, parse_header
from drawloom.components.storage.state_tree import Tree, entries, named, unpack
from drawloom.components.storage.strict_json import parse
from drawloom.components.storage.tensor_bytes import empty
from drawloom.graph import UserError

FOLDER = "checkpoints"
STEP = re.compile(r"step-(0|[1-9][0-9]*)")
LARGEST_TREE = 2**28  # bytes

Pick = Callable[[int, str], Collection[str] | bool]
"""Of a rank's file and a node: the entries of its state that are wanted, or all of them, or none."""

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
    if damaged:
        raise none_whole(run_folder / FOLDER, damaged)
    return None


def none_whole(checkpoints: Path, damaged: Mapping[Path, str]) -> UserError:
    """What a person is told whose checkpoints are all damaged."""
    lines = [f"no checkpoint in {checkpoints} is whole:"]
    lines += [f"  {path}: {fault}" for path, fault in damaged.items()]
    return UserError("\n".join([*lines, "put one back from a copy, or remove them all to start afresh"]))


def load_node(checkpoint: Path, node: str) -> dict[str, Any]:
    """
    The saved state of one node, rank 0's if each rank has its own.

    Raises UserError if there is none, or if it is damaged.
    """
    try:
        manifest = read_manifest(checkpoint)
        reader = Reader(checkpoint, manifest)
        state: dict[str, Any] = {}
        for rank in range(manifest.world_size if node in manifest.spread else 1):
            state |= reader.states(rank, lambda _rank, name: name == node).get(node, {})
    except Damaged as error:
        raise UserError(f"{checkpoint} is damaged: {error}") from error
    if node not in (there := [*manifest.replicated, *manifest.spread, *manifest.local]):
        raise UserError(f"{checkpoint} has no state of [{node}]; it has {', '.join(there) or 'none at all'}")
    return state


def committed(checkpoints: Path) -> list[Path]:
    """The folders of steps, oldest first, whole or not."""
    paths = [checkpoints / name for name in durable_files.names(checkpoints) if STEP.fullmatch(name)]
    return sorted(paths, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was saved, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


@attrs.define
class Reader:
    """Reads what ranks wrote. `verified` are the files that were read to their end, and are as they were committed."""

    checkpoint: Path
    manifest: Manifest
    verified: set[str] = attrs.field(factory=set)
    _trees: dict[int, dict[str, Tree]] = attrs.field(init=False, factory=dict)

    def tree(self, rank: int) -> dict[str, Tree]:
        """Node to tree, of all that one rank wrote; Damaged if that is not what was committed."""
        if rank not in self._trees:
            name = tree_file(rank)
            try:
                text, found = durable_files.read_file(self.checkpoint / name, LARGEST_TREE)
                self._verify(name, found)
                self._trees[rank] = entries(parse(text, most=len(text)))
                for part in self._trees[rank].values():
                    entries(part)  # the state of each node is a dict
            except OSError as error:
                raise Damaged(f"{name} can't be read ({error.strerror})") from error
            except ValueError as error:
                raise Damaged(f"{name} can't be read: {error}") from error
        return self._trees[rank]

    def states(self, rank: int, pick: Pick) -> dict[str, dict[str, Any]]:
        """
        Node to state, of what is picked from all that one rank wrote; Damaged if that is not what was committed.

        What is read is read to its end, and compared with its digest, before anything is given.
        """
        tree = self.tree(rank)
        try:
            picked = {node: _picked(part, pick(rank, node)) for node, part in tree.items()}
            whole: Tree = {"dict": {node: part for node, part in picked.items() if part is not None}}
            wanted = named(whole)
            states: dict[str, dict[str, Any]] = unpack(whole, self._tensors(rank, wanted) if wanted else {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Damaged(f"{tree_file(rank)} and its tensors don't belong together: {error}") from error
        return states

    def _tensors(self, rank: int, wanted: Collection[str]) -> dict[str, Tensor]:
        """The wanted tensors of a rank; its files are read side by side, each once and in order."""
        names = list(takewhile(self.manifest.files.__contains__, map(partial(tensors_file, rank), count())))
        if not names:
            raise Damaged(f"{MANIFEST} does not list {tensors_file(rank)}")
        works = [partial(self._tensors_of, name, wanted) for name in names]
        return dict(item for tensors in side_by_side("reader", works, READERS) for item in tensors.items())

    def _tensors_of(self, name: str, wanted: Collection[str]) -> dict[str, Tensor]:
        """The wanted tensors of a file; if it has none, it is not read to its end."""
        try:
            with durable_files.reading(self.checkpoint / name) as file:
                tensors = _wanted_tensors(file, wanted)
                if tensors:
                    self._verify(name, file.content())
                return tensors
        except OSError as error:
            raise Damaged(f"{name} can't be read ({error.strerror})") from error
        except BadHeader as error:
            self._verify(name, durable_files.content(self.checkpoint / name))
            raise Damaged(f"{name} can't be read: {error}") from error

    def _verify(self, name: str, found: durable_files.Content) -> None:
        if name not in self.manifest.files:
            raise Damaged(f"{MANIFEST} does not list {name}")
        if fault := difference(name, found, self.manifest.files[name]):
            raise Damaged(fault)
        self.verified.add(name)


def _picked(tree: Tree, wanted: Collection[str] | bool) -> Tree | None:
    """The wanted part of a node's tree, None if nothing of it is."""
    if isinstance(wanted, bool):
        return tree if wanted else None
    return {"dict": {name: part for name, part in entries(tree).items() if name in wanted}}


def _wanted_tensors(file: durable_files.Reading, wanted: Collection[str]) -> dict[str, Tensor]:
    length = header_length(file.read(min(8, file.size)), file.size)
    found = parse_header(file.read(length), file.size - 8 - length)
    tensors: dict[str, Tensor] = {}
    if not found.keys() & wanted:
        return tensors
    for name, entry in sorted(found.items(), key=lambda item: (item[1].start, item[1].end)):
        if name in wanted:
            tensors[name], memory = empty(entry.kind)
            file.fill(memory)
        else:
            file.skip(entry.end - entry.start)
    return tensors
