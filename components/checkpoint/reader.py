"""
Reader for checkpoints: a run's newest valid one, and its states.

Manifests and files are verified before use: their content is untrusted, and may be missing, changed or another's.
"""

import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from drawloom import UserError, internal
from drawloom.components.checkpoint.commit import (
    FOLDER,
    FORMAT,
    MANIFEST,
    CorruptCheckpointError,
    Manifest,
    hash_manifest,
    list_checkpoints,
    tree_file_name,
)
from drawloom.components.checkpoint.pieces import assemble_pieces, find_rows_unless_all, is_piece_needed
from drawloom.components.distributed.threads import map_parallel
from drawloom.components.storage.durable_files import FileDigest, count_hash_blocks, list_folder, read_file
from drawloom.components.storage.safetensors.reader import HeaderError, read_header_entries, read_tensor
from drawloom.components.storage.state_tree import (
    Tree,
    iterate_tensor_names_and_slices,
    list_dict_entries,
    unpack_state,
)
from drawloom.components.storage.strict_json import parse_strict_json
from drawloom.components.storage.verified_file import ContentMismatchError, VerifiedFile, open_file_to_verify
from drawloom.ports import NodeState, SlicedTensor, TensorSlice

MAX_SIZE = 2**26  # bytes of a manifest, enough for 3 TB; larger files are not read into memory
READERS = 4  # files to read in parallel

NAME = re.compile(r"[A-Za-z0-9_.\-]{1,255}")
SHA256 = re.compile(r"[0-9a-f]{64}")


def read_manifest(checkpoint: Path) -> Manifest:
    """
    Return a checkpoint's manifest.

    Raises CorruptCheckpointError if it is invalid, UserError if another version of drawloom wrote it.
    """
    content = _read_verified_content(checkpoint)
    version = content.pop("format")
    if version != FORMAT:
        raise UserError(
            f"{checkpoint} has format {version}, and this version of drawloom reads format {FORMAT}; use the version "
            "that wrote it"
        )
    manifest = _parse_manifest(content)
    if checkpoint.name != f"step-{manifest.step}":
        raise CorruptCheckpointError(f"{MANIFEST} has step {manifest.step}, and the folder's name has another step")
    return manifest


def verify_checkpoint(checkpoint: Path) -> Manifest:
    """Verify every file, and return the manifest. Raises CorruptCheckpointError with every file that differs."""
    manifest = read_manifest(checkpoint)
    if faults := [
        *describe_missing_and_unknown_files(checkpoint, manifest),
        *describe_differing_blocks(checkpoint, manifest, block_numbers_by_file(manifest)),
    ]:
        raise CorruptCheckpointError("; ".join(faults))
    return manifest


def block_numbers_by_file(manifest: Manifest) -> dict[str, list[int]]:
    """Return every file's block numbers."""
    return {name: [*range(len(content.blocks))] for name, content in manifest.files.items()}


def describe_missing_and_unknown_files(checkpoint: Path, manifest: Manifest) -> Iterator[str]:
    """Describe missing files, and files missing from the manifest."""
    present, listed = set(list_folder(checkpoint)), {*manifest.files, MANIFEST}
    yield from (f"{name} is missing" for name in sorted(listed - present))
    yield from (f"{name} is not in the manifest" for name in sorted(present - listed))


def describe_differing_blocks(
    checkpoint: Path, manifest: Manifest, blocks: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    """Describe how these blocks differ from the committed blocks; READERS files are read in parallel."""

    def find_fault_of_file(name: str) -> str:
        try:
            with open_file_to_verify(checkpoint / name, manifest.files[name]) as file:
                file.verify(blocks[name])
        except FileNotFoundError:
            return ""  # describe_missing_and_unknown_files reports it
        except OSError as error:
            return f"{name} can't be read ({error.strerror})"
        except ContentMismatchError as error:
            return f"{name} {error}"
        return ""

    yield from filter(None, map_parallel("verifier", [partial(find_fault_of_file, name) for name in blocks], READERS))


def read_manifest_if_sizes_match(checkpoint: Path) -> Manifest | None:
    """Return the manifest if it, all names and all sizes are as committed, else None. Files are not read."""
    try:
        manifest = read_manifest(checkpoint)
        sizes = {name: os.lstat(checkpoint / name).st_size for name in manifest.files}
    except (CorruptCheckpointError, UserError, OSError):
        return None
    return manifest if all(sizes[name] == content.size for name, content in manifest.files.items()) else None


def _read_verified_content(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest's content without its checksum, which is verified."""
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        raise CorruptCheckpointError("it is a symbolic link, or not a folder")
    try:
        text = read_file(checkpoint / MANIFEST, MAX_SIZE)
        content: dict[str, Any] = parse_strict_json(text, max_values=len(text))
        digest = content.pop("digest")
        version = content["format"]
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptCheckpointError(f"{MANIFEST} can't be read ({type(error).__name__})") from error
    if digest != hash_manifest(content):
        raise CorruptCheckpointError(f"{MANIFEST} has a checksum mismatch")
    if type(version) is not int:
        raise CorruptCheckpointError(f"{MANIFEST} has a format that is not a number")
    return content


def _parse_manifest(content: dict[str, Any]) -> Manifest:
    if other := content.keys() ^ {field.name for field in attrs.fields(Manifest)}:
        raise CorruptCheckpointError(f"{MANIFEST} has missing or unknown entries: {', '.join(sorted(other))!r:.99}")
    if invalid := [name for name, fits in ENTRIES.items() if not fits(content[name])]:
        raise CorruptCheckpointError(f"{MANIFEST} has an invalid value of {invalid[0]!r}")
    files = {name: FileDigest(**fields) for name, fields in content.pop("files").items()}
    if unsafe := [name for name in files if not NAME.fullmatch(name) or name in (".", "..", MANIFEST)]:
        raise CorruptCheckpointError(f"{MANIFEST} lists {unsafe[0]!r:.99}, which is not a plain file name")
    return Manifest(files=files, **content)


def _is_nonnegative_integer(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_content_of_file(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"size", "blocks"}
        and _is_nonnegative_integer(value["size"])
        and _are_strings(value["blocks"])
        and len(value["blocks"]) == count_hash_blocks(value["size"])
        and all(map(SHA256.fullmatch, value["blocks"]))
    )


def _is_finite_metric_or_null(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value))


ENTRIES: Mapping[str, Callable[[Any], bool]] = {
    "step": _is_nonnegative_integer,
    "recipe": lambda value: isinstance(value, str),
    "world_size": lambda value: _is_nonnegative_integer(value) and value > 0,
    "replicated": _are_strings,
    "local": _are_strings,
    "sharded": _are_strings,
    "files": lambda value: isinstance(value, dict) and all(map(_is_content_of_file, value.values())),
    "values": lambda value: isinstance(value, dict) and all(map(_is_finite_metric_or_null, value.values())),
}


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
            header_end, header = read_header_entries(file)
            # in file order, so that a block with parts of two tensors is read once
            for name in sorted(names, key=lambda name: (header[name].start, header[name].end)):
                part = find_rows_unless_all(header[name].spec.shape, uses[name])
                rows = None if part is None else range(part.offsets[0], part.offsets[0] + part.size[0])
                tensor = read_tensor(file, header_end, header[name], rows)
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
