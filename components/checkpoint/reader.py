"""Reader for checkpoints: a run's newest valid one, and its states."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from drawloom import UserError, internal
from drawloom.components.checkpoint.commit import tree_file_name
from drawloom.components.checkpoint.manifest import FOLDER, MANIFEST, CorruptCheckpointError, Manifest, list_checkpoints
from drawloom.components.checkpoint.pieces import assemble_pieces, find_rows_unless_all, is_piece_needed
from drawloom.components.checkpoint.threads import map_parallel
from drawloom.components.checkpoint.verification import READERS, read_manifest, verify_checkpoint
from drawloom.components.storage.safetensors.header import HeaderError
from drawloom.components.storage.safetensors.reader import read_header_entries, read_tensor
from drawloom.components.storage.state_tree import (
    Tree,
    iterate_tensor_names_and_slices,
    list_dict_entries,
    unpack_state,
)
from drawloom.components.storage.strict_json import parse_strict_json
from drawloom.components.storage.verified_file import ContentMismatchError, VerifiedFile, open_file_to_verify
from drawloom.ports import NodeState, SlicedTensor, TensorSlice

MAX_TREE_SIZE = 2**28  # bytes

Slices = Mapping[str, TensorSlice | None]
"""Entries of a state, with the slice of their tensors to read, or None for whole tensors."""

Pick = Callable[[int, str], Slices | bool]
"""Function of the rank that wrote a state, and its node: the entries to read, or whether to read all."""

Uses = dict[str, list[tuple[TensorSlice | None, TensorSlice | None]]]
"""Saved tensors by name, as pairs of their slice and the slice to read; None for the whole."""

Parts = dict[str, Tensor | SlicedTensor]
"""Saved tensors that were read by name, as a whole or only a slice."""

log = logging.getLogger("drawloom.checkpoint")


def find_newest_valid_checkpoint(run_folder: Path) -> Path | None:
    """
    Return a run's newest valid checkpoint, with every file hashed; None if the run has no checkpoint.

    Skips a corrupt checkpoint with a warning. Raises UserError if all are corrupt.
    """
    corrupt = {}
    for path in reversed(list_checkpoints(run_folder / FOLDER)):
        try:
            verify_checkpoint(path)
            return path
        except CorruptCheckpointError as error:
            if not os.path.lexists(path):
                return find_newest_valid_checkpoint(run_folder)  # its run has just removed it
            corrupt[path] = str(error)
            log.warning("%s is corrupt and skipped: %s", path, error)
    if corrupt:
        raise no_valid_checkpoint_error(run_folder / FOLDER, corrupt)
    return None


def no_valid_checkpoint_error(checkpoints: Path, corrupt: Mapping[Path, str]) -> UserError:
    """Return the error for a run with only corrupt checkpoints, with their faults."""
    lines = [f"no checkpoint in {checkpoints} is valid:"]
    lines += [f"  {path}: {fault}" for path, fault in corrupt.items()]
    return UserError("\n".join([*lines, "restore one from a backup, or remove them all to start from step 0"]))


def load_node_state(checkpoint: Path, node: str) -> NodeState:
    """
    Return one node's saved state; for a local state, rank 0's.

    Raises UserError if there is none, or if the checkpoint is corrupt.
    """
    try:
        manifest = read_manifest(checkpoint)
        reader = CheckpointReader(checkpoint, manifest)
        ranks = range(manifest.world_size if node in manifest.sharded else 1)
        state = reader.read_and_join_states(ranks, lambda _rank, name: name == node).get(node, {})
    except CorruptCheckpointError as error:
        raise UserError(f"{checkpoint} is corrupt: {error}") from error
    if node not in (saved := [*manifest.replicated, *manifest.sharded, *manifest.local]):
        raise UserError(f"{checkpoint} has no state of [{node}]; it has {', '.join(saved) or 'none'}")
    return state


class PieceReader:
    """Reader for states saved in pieces by ranks, which assembles slices for any layout of ranks."""

    def read_trees_by_node(self, rank: int) -> dict[str, Tree]:
        """Return a rank's trees, by node. Raises CorruptCheckpointError."""
        raise NotImplementedError

    def read_tensors(self, rank: int, uses: Uses) -> Parts:
        """Read a rank's used tensors."""
        raise NotImplementedError

    def read_and_join_states(self, ranks: Iterable[int], pick: Pick) -> dict[str, NodeState]:
        """
        Return the picked states from several ranks, by node, with slices assembled. Raises
        CorruptCheckpointError.
        """
        pieces: dict[str, dict[str, list[Any]]] = {}
        for rank in ranks:
            for node, state in self.read_states_by_node(rank, pick).items():
                entries_of_node = pieces.setdefault(node, {})
                for entry, piece in state.items():
                    entries_of_node.setdefault(entry, []).append(piece)
        try:
            return {
                node: {
                    entry: assemble_pieces(parts, _slice_to_read_or_none(pick, 0, node, entry))
                    for entry, parts in state.items()
                }
                for node, state in pieces.items()
            }
        except ValueError as error:
            raise CorruptCheckpointError(str(error)) from error

    def read_states_by_node(self, rank: int, pick: Pick) -> dict[str, NodeState]:
        """
        Return the picked states from one rank, by node. Raises CorruptCheckpointError.

        Reads only the necessary rows from tensors that are, or may be, cut for the picked entries.
        """
        self.read_trees_by_node(rank)
        try:
            picked, uses = self.pick_trees_and_find_uses(rank, pick)
            states: dict[str, NodeState] = unpack_state({"dict": picked}, self.read_tensors(rank, uses))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{tree_file_name(rank)} does not match its tensors: {error}") from error
        return states

    def pick_trees_and_find_uses(self, rank: int, pick: Pick) -> tuple[dict[str, Tree], Uses]:
        """Return the picked part of a rank's trees, by node, and the uses of its tensors."""
        picked: dict[str, Tree] = {}
        uses: Uses = {}
        for node, part in self.read_trees_by_node(rank).items():
            if (wanted := _pick_from_tree(part, pick(rank, node))) is not None:
                picked[node] = wanted
                for entry, subtree in list_dict_entries(wanted).items():
                    for name, saved in iterate_tensor_names_and_slices(subtree):
                        uses.setdefault(name, []).append((saved, _slice_to_read_or_none(pick, rank, node, entry)))
        return picked, uses


@attrs.define
class CheckpointReader(PieceReader):
    """Reader for a checkpoint's files. `verified` has the verified blocks by file."""

    checkpoint: Path
    manifest: Manifest
    verified: dict[str, set[int]] = attrs.field(factory=dict)
    _trees: dict[int, dict[str, Tree]] = internal(factory=dict)
    _files: dict[int, dict[str, list[str]]] = internal(factory=dict)

    def read_trees_by_node(self, rank: int) -> dict[str, Tree]:
        if rank not in self._trees:
            name = tree_file_name(rank)
            with self._open_file(name) as file:
                if file.size > MAX_TREE_SIZE:
                    raise OSError(0, f"it has {file.size} bytes, and more than {MAX_TREE_SIZE} are not read")
                text = file.read(0, file.size)
            try:
                content = parse_strict_json(text, max_values=len(text))
                self._files[rank] = _parse_names_by_file(content["tensors"])
                self._trees[rank] = list_dict_entries(content["state"])
                for part in self._trees[rank].values():
                    list_dict_entries(part)  # the state of each node is a dict
            except (ValueError, KeyError, TypeError) as error:
                raise CorruptCheckpointError(f"{name} is invalid: {error}") from error
        return self._trees[rank]

    def read_tensors(self, rank: int, uses: Uses) -> Parts:
        """Read a rank's used tensors, from several files in parallel."""
        listed = self._files[rank].items()
        files = {file: names for file, stored in listed if (names := uses.keys() & set(stored))}
        jobs = [partial(self._read_tensors_of_file, file, names, uses) for file, names in files.items()]
        return {name: part for parts in map_parallel("reader", jobs, READERS) for name, part in parts.items()}

    def _read_tensors_of_file(self, file_name: str, names: set[str], uses: Uses) -> Parts:
        parts: Parts = {}
        with self._open_file(file_name) as file:
            begin, header = read_header_entries(file)
            # in file order, so that a block with parts of two tensors is read once
            for name in sorted(names, key=lambda name: (header[name].start, header[name].end)):
                part = find_rows_unless_all(header[name].spec.shape, uses[name])
                rows = None if part is None else range(part.offsets[0], part.offsets[0] + part.size[0])
                tensor = read_tensor(file, begin, header[name], rows)
                parts[name] = tensor if part is None else SlicedTensor(tensor, part)
        return parts

    @contextmanager
    def _open_file(self, name: str) -> Iterator[VerifiedFile]:
        """Open a checkpoint file. Its faults are raised as CorruptCheckpointError."""
        if name not in self.manifest.files:
            raise CorruptCheckpointError(f"{MANIFEST} does not list {name}")
        try:
            with open_file_to_verify(self.checkpoint / name, self.manifest.files[name]) as file:
                yield file
                self.verified.setdefault(name, set()).update(file.verified)
        except OSError as error:
            raise CorruptCheckpointError(f"{name} can't be read ({error.strerror})") from error
        except ContentMismatchError as error:
            raise CorruptCheckpointError(f"{name} {error}") from error
        except HeaderError as error:
            raise CorruptCheckpointError(f"{name} has an invalid safetensors header: {error}") from error


def _parse_names_by_file(content: Any) -> dict[str, list[str]]:
    """Validate parsed JSON as tensor names by file, and return it. Raises ValueError for anything else."""
    if not isinstance(content, dict) or not all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in content.values()
    ):
        raise ValueError("`tensors` is not a table of file names with lists of tensor names")
    return content


def _pick_from_tree(tree: Tree, wanted: Slices | bool) -> Tree | None:
    """Return the wanted part from a node's tree, or None if nothing is wanted."""
    if isinstance(wanted, bool):
        return tree if wanted else None
    picked = {name: part for name, part in list_dict_entries(tree).items() if name in wanted}
    slices = {
        name: [part for _, part in iterate_tensor_names_and_slices(tree) if part] for name, tree in picked.items()
    }
    return {"dict": {name: part for name, part in picked.items() if is_piece_needed(slices[name], wanted[name])}}


def _slice_to_read_or_none(pick: Pick, rank: int, node: str, entry: str) -> TensorSlice | None:
    """Return an entry's wanted slice, or None for the whole entry."""
    wanted = pick(rank, node)
    return None if isinstance(wanted, bool) else wanted.get(entry)
