"""
Readers of safetensors: Hugging Face folders with the safetensors library, and files of checkpoints with their digests.

Files are untrusted: only regular files are opened, and nothing outside of the folder is opened.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from drawloom.components.storage.regular_file import RegularFile, open_regular_file
from drawloom.components.storage.safetensors.header import Entry, HeaderError, format_names, map_file, read_entries
from drawloom.components.storage.strict_json import parse
from drawloom.components.storage.tensor_source import TensorSpec, empty
from drawloom.graph import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_INDEX = 32 * 2**20  # bytes
MAX_PLACES = 250_000  # tensors of all files; the largest open models have 140,000
MAX_FILES = 10_000


@attrs.frozen
class SafetensorsFile:
    """A file with a valid header: the specs of its tensors, and its identity (see RegularFile)."""

    path: Path
    specs: Mapping[str, TensorSpec]
    identity: tuple[int, int, int, int]


@attrs.define
class SafetensorsFolder:
    """
    Source of the tensors of a folder; `files` maps each name to its file.

    Tensors are views of mapped files: of a tensor that is sliced, only the slice is read. The file in use stays mapped,
    so that its header is not parsed again for each tensor.
    """

    files: Mapping[str, SafetensorsFile]
    _mapped: tuple[Path, Any] | None = attrs.field(init=False, default=None)

    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: file.specs[name] for name, file in self.files.items()}

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, any shape, on the CPU; UserError if its file has changed."""
        file = self.files[name]
        with open_regular_file(file.path) as opened:
            if opened.identity != file.identity:
                raise UserError(f"{file.path} was changed while {name} was read; copy it again")
        if self._mapped is None or self._mapped[0] != file.path:
            with _as_user_error(file.path):
                self._mapped = file.path, map_file(file.path)
        tensor: Tensor = self._mapped[1].get_tensor(name)
        return tensor


def read_verified_header(file: RegularFile) -> tuple[int, dict[str, Entry]]:
    """
    Return the offset at which the tensors of a file begin, and its entries by name; HeaderError if it is invalid.

    The header's bytes are read through `file` first, as a VerifiedFile compares them with their digests.
    """
    length = int.from_bytes(file.read(0, min(8, file.size)), "little")
    file.read(8, min(length, max(file.size - 8, 0)))
    entries = read_entries(map_file(file.path))
    return 8 + length, entries


def read_tensor(file: RegularFile, begin: int, entry: Entry, rows: range | None = None) -> Tensor:
    """
    Read a tensor of any shape (its entry's) into new memory on the CPU; `begin` is the offset of all tensors.

    Of a tensor with dimensions, `rows` selects a range of rows. Checkpoints are read with this function and not with
    the library, so that every byte in use is one that was compared with its digest.
    """
    spec, start = entry.spec, begin + entry.start
    if rows is not None:
        row = TensorSpec(spec.shape[1:], spec.dtype)
        spec, start = TensorSpec((len(rows), *row.shape), row.dtype), start + rows.start * row.bytes
    tensor, memory = empty(spec)
    file.read_into(memory, start)
    return tensor


def open_safetensors_folder(folder: Path) -> SafetensorsFolder:
    """
    Read the headers of `model.safetensors`, or of the files that `model.safetensors.index.json` names.

    Raises UserError with all differences between index and files, or with the file and tensor that are invalid. Nothing
    outside of the folder is opened.
    """
    if not os.path.isdir(folder):
        raise UserError(f"{folder} is not a folder; write the path of a Hugging Face model folder")
    if os.path.lexists(folder / SINGLE):
        single = read_safetensors_header(folder / SINGLE)
        return SafetensorsFolder(dict.fromkeys(single.specs, single))
    if not os.path.lexists(folder / INDEX):
        raise UserError(f"{folder} holds neither {SINGLE} nor {INDEX}; write the path of a Hugging Face model folder")
    places, total = _read_index(folder / INDEX)
    files = {file: _read_shard(folder, file, name) for file, name in {f: n for n, f in places.items()}.items()}
    if reasons := list(_differences(places, files, total)):
        raise UserError(f"{folder / INDEX} and its files differ: {'; '.join(reasons)}; copy the folder again")
    return SafetensorsFolder({name: files[file] for name, file in places.items()})


def read_safetensors_header(path: Path) -> SafetensorsFile:
    """The header of a file; UserError if it is invalid."""
    with open_regular_file(path) as file, _as_user_error(path):
        return SafetensorsFile(
            path, {name: entry.spec for name, entry in read_entries(map_file(path)).items()}, file.identity
        )


def _read_shard(folder: Path, file: str, name: str) -> SafetensorsFile:
    """The header of a file of an index; `name` is a tensor that the index places there, for messages."""
    try:
        return read_safetensors_header(folder / file)
    except UserError as error:
        raise UserError(f"{folder / INDEX} places {name!r:.99} in {file!r:.99}: {error}") from error


@contextmanager
def _as_user_error(path: Path) -> Iterator[None]:
    try:
        yield
    except HeaderError as error:
        raise UserError(f"{path} can't be read as safetensors: {error}; copy the file again") from error


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """The file name of each tensor, and the stated total size; UserError unless all are plain file names."""
    with open_regular_file(path) as file:
        if file.size > MAX_INDEX:
            raise UserError(f"{path} has {file.size} bytes, and more than {MAX_INDEX} are not read; copy it again")
        text = file.read(0, file.size)
    try:
        index = parse(text, most=3 * MAX_PLACES)
    except ValueError as error:
        raise UserError(f"{path} is not JSON that can be read: {error}; copy the file again") from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise UserError(f"{path} has no weight_map; copy the file again")
    for name, file_name in places.items():
        if not _is_plain(file_name):
            why = f"{path} places {name!r:.99} in {file_name!r:.99}"
            raise UserError(f"{why}, which is not a file of the folder; take another copy")
    if (count := len(set(places.values()))) > MAX_FILES:
        raise UserError(f"{path} names {count} files, and more than {MAX_FILES} are not read; take another copy")
    return places, _total(index, path)


def _is_plain(file: Any) -> bool:
    # Path separators and drive letters would lead out of the folder.
    if not isinstance(file, str) or file in ("", ".", "..") or not file.isprintable():
        return False
    return not set(file) & set("/\\:") and len(file.encode()) < 256


def _total(index: Mapping[str, Any], path: Path) -> int | None:
    """The total size that an index states, if it states one."""
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is None:
        return None
    if type(total) not in (int, float) or not 0 <= total < 2**63 or total != int(total):
        raise UserError(f"{path} says total_size = {total!r:.99}, which is not a number of bytes; copy the file again")
    return int(total)


def _differences(places: Mapping[str, str], files: Mapping[str, SafetensorsFile], total: int | None) -> Iterator[str]:
    if missing := [f"{name} (in {file})" for name, file in places.items() if name not in files[file].specs]:
        yield f"missing {format_names(missing)}"
    held = [(name, file) for file, found in files.items() for name in found.specs]
    if unknown := [f"{name} (in {file})" for name, file in held if name not in places]:
        yield f"unexpected {format_names(unknown)}"
    if double := [f"{name} (also in {file})" for name, file in held if places.get(name, file) != file]:
        yield f"duplicate {format_names(double)}"
    size = sum(spec.bytes for file in files.values() for spec in file.specs.values())
    if total not in (None, size) and not missing and not unknown:
        yield f"its total_size is {total}, and the tensors have {size} bytes"
