"""Reads checkpoints: the newest valid one of a run, and the states in it."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from drawloom.components.checkpoint.commit import tree_file
from drawloom.components.checkpoint.manifest import (
    FOLDER,
    MANIFEST,
    READERS,
    CorruptCheckpoint,
    Manifest,
    committed,
    read_manifest,
    verify,
)
from drawloom.components.checkpoint.snapshot import assemble, is_needed, needed_rows
from drawloom.components.checkpoint.threads import map_parallel
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.storage.regular_file import OtherContent, VerifiedFile, verified_file
from drawloom.components.storage.safetensors.header import HeaderError
from drawloom.components.storage.safetensors.reader import read_tensor, read_verified_header
from drawloom.components.storage.state_tree import Tree, entries, leaves, narrowed, unpack
from drawloom.components.storage.strict_json import parse
from drawloom.graph import UserError

LARGEST_TREE = 2**28  # bytes

Slices = Mapping[str, TensorSlice | None]
"""Entries of a state, each with the slice of its tensors that is wanted, or None for the whole."""

Pick = Callable[[int, str], Slices | bool]
"""Given the rank that wrote a state, and its node: the entries to read, or whether to read all."""

Uses = dict[str, list[tuple[TensorSlice | None, TensorSlice | None]]]
"""Of saved tensors: the slices that they are, each with the slice that is wanted; None for the whole."""

Parts = dict[str, tuple[Tensor, TensorSlice | None]]
"""Tensors that were read, each with the part that it is of the saved one; None for all of it."""

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
            if not os.path.lexists(path):
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
        ranks = range(manifest.world_size if node in manifest.sharded else 1)
        state = reader.joined(ranks, lambda _rank, name: name == node).get(node, {})
    except CorruptCheckpoint as error:
        raise UserError(f"{checkpoint} is corrupt: {error}") from error
    if node not in (there := [*manifest.replicated, *manifest.sharded, *manifest.local]):
        raise UserError(f"{checkpoint} has no state of [{node}]; it has {', '.join(there) or 'none'}")
    return state


@attrs.define
class Reader:
    """Reads the files of a checkpoint. `verified` are the blocks of each file that were read, and are as committed."""

    checkpoint: Path
    manifest: Manifest
    verified: dict[str, set[int]] = attrs.field(factory=dict)
    _trees: dict[int, dict[str, Tree]] = attrs.field(init=False, factory=dict)
    _files: dict[int, dict[str, list[str]]] = attrs.field(init=False, factory=dict)

    def tree(self, rank: int) -> dict[str, Tree]:
        """The trees that one rank wrote, by node. Raises CorruptCheckpoint."""
        if rank not in self._trees:
            name = tree_file(rank)
            with self._file(name) as file:
                if file.size > LARGEST_TREE:
                    raise OSError(0, f"it has {file.size} bytes, and more than {LARGEST_TREE} are not read")
                text = file.read(0, file.size)
            try:
                content = parse(text, most=len(text))
                self._files[rank] = _names_by_file(content["tensors"])
                self._trees[rank] = entries(content["state"])
                for part in self._trees[rank].values():
                    entries(part)  # the state of each node is a dict
            except (ValueError, KeyError, TypeError) as error:
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
                node: {entry: assemble(found, _place(pick, 0, node, entry)) for entry, found in state.items()}
                for node, state in pieces.items()
            }
        except ValueError as error:
            raise CorruptCheckpoint(str(error)) from error

    def states(self, rank: int, pick: Pick) -> dict[str, dict[str, Any]]:
        """
        The picked states that one rank wrote, by node. Raises CorruptCheckpoint.

        Of tensors that are cut for the picked entries, or may be, only the rows that are needed are read.
        """
        tree = self.tree(rank)
        try:
            picked: dict[str, Tree] = {}
            uses: Uses = {}
            for node, part in tree.items():
                if (found := _picked(part, pick(rank, node))) is not None:
                    picked[node] = found
                    for entry, each in entries(found).items():
                        for name, saved in leaves(each):
                            uses.setdefault(name, []).append((saved, _place(pick, rank, node, entry)))
            read = self._tensors(rank, uses)
            cut = narrowed({"dict": picked}, {name: part for name, (_, part) in read.items() if part is not None})
            states: dict[str, dict[str, Any]] = unpack(cut, {name: tensor for name, (tensor, _) in read.items()})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptCheckpoint(f"{tree_file(rank)} does not match its tensors: {error}") from error
        return states

    def _tensors(self, rank: int, uses: Uses) -> Parts:
        """The tensors in use of a rank; its files are read in parallel."""
        files = {file: names for file, each in self._files[rank].items() if (names := uses.keys() & set(each))}
        works = [partial(self._tensors_of, file, names, uses) for file, names in files.items()]
        return {name: part for parts in map_parallel("reader", works, READERS) for name, part in parts.items()}

    def _tensors_of(self, file_name: str, names: set[str], uses: Uses) -> Parts:
        parts: Parts = {}
        with self._file(file_name) as file:
            begin, found = read_verified_header(file)
            # In file order, so that a block with parts of two tensors is read once.
            for name in sorted(names, key=lambda each: (found[each].start, found[each].end)):
                part = needed_rows(found[name].spec.shape, uses[name])
                rows = None if part is None else range(part.offsets[0], part.offsets[0] + part.size[0])
                parts[name] = read_tensor(file, begin, found[name], rows), part
        return parts

    @contextmanager
    def _file(self, name: str) -> Iterator[VerifiedFile]:
        """A file of the checkpoint; what is wrong with it is raised as CorruptCheckpoint."""
        if name not in self.manifest.files:
            raise CorruptCheckpoint(f"{MANIFEST} does not list {name}")
        try:
            with verified_file(self.checkpoint / name, self.manifest.files[name]) as file:
                yield file
                self.verified.setdefault(name, set()).update(file.verified)
        except OSError as error:
            raise CorruptCheckpoint(f"{name} can't be read ({error.strerror})") from error
        except OtherContent as error:
            raise CorruptCheckpoint(f"{name} {error}") from error
        except HeaderError as error:
            raise CorruptCheckpoint(f"{name} can't be read: {error}") from error


def _names_by_file(content: Any) -> dict[str, list[str]]:
    """The names of the tensors in each file; ValueError if it is something else."""
    if not isinstance(content, dict) or not all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in content.values()
    ):
        raise ValueError("it does not say which tensors are in which file")
    return content


def _picked(tree: Tree, wanted: Slices | bool) -> Tree | None:
    """The wanted part of a node's tree, None if nothing of it is wanted."""
    if isinstance(wanted, bool):
        return tree if wanted else None
    found = {name: part for name, part in entries(tree).items() if name in wanted}
    return {"dict": {name: part for name, part in found.items() if is_needed(_places(part), wanted[name])}}


def _places(tree: Tree) -> list[TensorSlice]:
    return [place for _, place in leaves(tree) if place is not None]


def _place(pick: Pick, rank: int, node: str, entry: str) -> TensorSlice | None:
    """The wanted slice of an entry; None for the whole."""
    wanted = pick(rank, node)
    return None if isinstance(wanted, bool) else wanted.get(entry)
