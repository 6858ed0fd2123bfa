"""Reads checkpoints: the newest valid one of a run, and the states in it."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from drawloom.components.checkpoint.commit import tensors_file, tree_file
from drawloom.components.checkpoint.manifest import (
    FOLDER,
    MANIFEST,
    READERS,
    CorruptCheckpoint,
    Manifest,
    committed,
    difference,
    read_manifest,
    verify,
)
from drawloom.components.checkpoint.slices import assemble, is_needed
from drawloom.components.checkpoint.threads import map_parallel
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.storage.regular_file import hash_file, read_file, regular_file
from drawloom.components.storage.safetensors.header import BadHeader
from drawloom.components.storage.safetensors.reader import read_header, read_tensor
from drawloom.components.storage.sha256_stream import Content
from drawloom.components.storage.state_tree import Tree, entries, named, places, unpack
from drawloom.components.storage.strict_json import parse
from drawloom.graph import UserError

LARGEST_TREE = 2**28  # bytes

Slices = Mapping[str, TensorSlice | None]
"""Entries of a state, each with the slice of its tensors that is wanted, or None for the whole."""

Pick = Callable[[int, str], Slices | bool]
"""Given the rank that wrote a state, and its node: the entries to read, or whether to read all."""

log = logging.getLogger("drawloom.checkpoint")


def newest(run_folder: Path) -> Path | None:
    """
    The newest valid checkpoint of a run, with every file hashed; None if the run has none.

    A corrupt one is skipped with a warning. Raises UserError if all are corrupt.
    """
    corrupt = {}
    for path in reversed(committed(run_folder / FOLDER)):
        try:
            verify(path)
            return path
        except CorruptCheckpoint as error:
            if not path.exists():
                return newest(run_folder)  # the run that owns the folder has just removed it
            corrupt[path] = str(error)
            log.warning("%s is corrupt and skipped: %s", path, error)
    if corrupt:
        raise no_valid_checkpoint(run_folder / FOLDER, corrupt)
    return None


def no_valid_checkpoint(checkpoints: Path, corrupt: Mapping[Path, str]) -> UserError:
    """The error if all checkpoints of a run are corrupt, with the faults of each."""
    lines = [f"no checkpoint in {checkpoints} is valid:"]
    lines += [f"  {path}: {fault}" for path, fault in corrupt.items()]
    return UserError("\n".join([*lines, "restore one from a backup, or remove them all to start from step 0"]))


def load_node(checkpoint: Path, node: str) -> dict[str, Any]:
    """
    The saved state of one node; of a local state rank 0's.

    Raises UserError if there is none, or if the checkpoint is corrupt.
    """
    try:
        manifest = read_manifest(checkpoint)
        reader = Reader(checkpoint, manifest)
        ranks = range(manifest.world_size if node in manifest.spread else 1)
        state = reader.joined(ranks, lambda _rank, name: name == node).get(node, {})
    except CorruptCheckpoint as error:
        raise UserError(f"{checkpoint} is corrupt: {error}") from error
    if node not in (there := [*manifest.replicated, *manifest.spread, *manifest.local]):
        raise UserError(f"{checkpoint} has no state of [{node}]; it has {', '.join(there) or 'none'}")
    return state


@attrs.define
class Reader:
    """Reads the files of a checkpoint. `verified` are those that were hashed to the end and are as committed."""

    checkpoint: Path
    manifest: Manifest
    verified: set[str] = attrs.field(factory=set)
    _trees: dict[int, dict[str, Tree]] = attrs.field(init=False, factory=dict)

    def tree(self, rank: int) -> dict[str, Tree]:
        """The trees that one rank wrote, by node. Raises CorruptCheckpoint."""
        if rank not in self._trees:
            name = tree_file(rank)
            try:
                text, found = read_file(self.checkpoint / name, LARGEST_TREE)
                self._verify(name, found)
                self._trees[rank] = entries(parse(text, most=len(text)))
                for part in self._trees[rank].values():
                    entries(part)  # the state of each node is a dict
            except OSError as error:
                raise CorruptCheckpoint(f"{name} can't be read ({error.strerror})") from error
            except ValueError as error:
                raise CorruptCheckpoint(f"{name} can't be read: {error}") from error
        return self._trees[rank]

    def joined(self, ranks: Iterable[int], pick: Pick) -> dict[str, dict[str, Any]]:
        """The picked states that some ranks wrote, by node, with slices put together. Raises CorruptCheckpoint."""
        pieces: dict[str, dict[str, list[Any]]] = {}
        for rank in ranks:
            for node, state in self.states(rank, pick).items():
                found = pieces.setdefault(node, {})
                for entry, piece in state.items():
                    found.setdefault(entry, []).append(piece)
        try:
            return {
                node: {entry: assemble(found, _place(pick, node, entry)) for entry, found in state.items()}
                for node, state in pieces.items()
            }
        except ValueError as error:
            raise CorruptCheckpoint(str(error)) from error

    def states(self, rank: int, pick: Pick) -> dict[str, dict[str, Any]]:
        """
        The picked states that one rank wrote, by node. Raises CorruptCheckpoint.

        Every file that is read is hashed to the end, and verified before any of it is returned.
        """
        tree = self.tree(rank)
        try:
            picked = {node: _picked(part, pick(rank, node)) for node, part in tree.items()}
            whole: Tree = {"dict": {node: part for node, part in picked.items() if part is not None}}
            wanted = named(whole)
            states: dict[str, dict[str, Any]] = unpack(whole, self._tensors(rank, wanted) if wanted else {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptCheckpoint(f"{tree_file(rank)} does not match its tensors: {error}") from error
        return states

    def _tensors(self, rank: int, wanted: Collection[str]) -> dict[str, Tensor]:
        """The wanted tensors of a rank; its files are read in parallel, each once and sequentially."""
        names = list(takewhile(self.manifest.files.__contains__, map(partial(tensors_file, rank), count())))
        if not names:
            raise CorruptCheckpoint(f"{MANIFEST} does not list {tensors_file(rank)}")
        works = [partial(self._tensors_of, name, wanted) for name in names]
        return dict(item for tensors in map_parallel("reader", works, READERS) for item in tensors.items())

    def _tensors_of(self, name: str, wanted: Collection[str]) -> dict[str, Tensor]:
        """The wanted tensors of a file; if it has none of them, only its header is read."""
        try:
            with regular_file(self.checkpoint / name, hashed=True) as file:
                begin, found = read_header(file)
                # in file order, so that one sequential pass reads and hashes
                in_order = sorted(found.keys() & wanted, key=lambda each: (found[each].start, found[each].end))
                tensors = {each: read_tensor(file, begin, found[each]) for each in in_order}
                if tensors:
                    self._verify(name, file.content())
                return tensors
        except OSError as error:
            raise CorruptCheckpoint(f"{name} can't be read ({error.strerror})") from error
        except BadHeader as error:
            self._verify(
                name, hash_file(self.checkpoint / name)
            )  # corruption is likelier than a format that is not supported
            raise CorruptCheckpoint(f"{name} can't be read: {error}") from error

    def _verify(self, name: str, found: Content) -> None:
        if name not in self.manifest.files:
            raise CorruptCheckpoint(f"{MANIFEST} does not list {name}")
        if fault := difference(name, found, self.manifest.files[name]):
            raise CorruptCheckpoint(fault)
        self.verified.add(name)


def _picked(tree: Tree, wanted: Slices | bool) -> Tree | None:
    """The wanted part of a node's tree, None if nothing of it is wanted."""
    if isinstance(wanted, bool):
        return tree if wanted else None
    found = {name: part for name, part in entries(tree).items() if name in wanted}
    return {"dict": {name: part for name, part in found.items() if is_needed(places(part), wanted[name])}}


def _place(pick: Pick, node: str, entry: str) -> TensorSlice | None:
    """The wanted slice of an entry; None for the whole."""
    wanted = pick(0, node)
    return None if isinstance(wanted, bool) else wanted.get(entry)
