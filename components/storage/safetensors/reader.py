"""
Readers for safetensors: Hugging Face folders through the safetensors library, and checkpoint files with digests.

The library reads and validates headers. Files are untrusted: only regular files inside the folder are opened.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from errno import ENOENT
from pathlib import Path
from typing import Any

import attrs
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drawloom import UserError, internal
from drawloom.components.storage.durable_files import RegularFile, open_untrusted_file
from drawloom.components.storage.safetensors.writer import (
    DTYPES,
    MAX_DIMENSIONS,
    TensorEntry,
    format_names,
    is_valid_tensor_name,
)
from drawloom.components.storage.strict_json import parse_strict_json
from drawloom.components.storage.tensor_source import TensorSpec, allocate_tensor_and_byte_view

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_INDEX_SIZE = 32 * 2**20  # bytes
MAX_TENSORS = 250_000  # in all files; the largest open models have 140,000
MAX_FILES = 10_000


class HeaderError(Exception):
    """Invalid safetensors header; the message has the reason."""


@attrs.frozen
class SafetensorsFile:
    """File with a valid header: tensor specs, and its identity (see RegularFile)."""

    path: Path
    specs: Mapping[str, TensorSpec]
    identity: tuple[int, int, int, int]


@attrs.define
class SafetensorsFolder:
    """
    Source for a folder's tensors; `files` maps names to files.

    Tensors are views of mapped files: slicing a tensor reads only the slice. The last file stays mapped, so
    its header is parsed once.
    """

    files: Mapping[str, SafetensorsFile]
    _mapped: tuple[Path, Any] | None = internal(None)

    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: file.specs[name] for name, file in self.files.items()}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, any shape, on the CPU. Raises UserError if its file has changed."""
        file = self.files[name]
        with open_untrusted_file(file.path) as opened:
            if opened.identity != file.identity:
                raise UserError(f"{file.path} was changed while {name} was read; copy it again")
        if self._mapped is None or self._mapped[0] != file.path:
            with _convert_header_errors(file.path):
                self._mapped = file.path, open_mapped_safetensors_file(file.path)
        tensor: Tensor = self._mapped[1].get_tensor(name)
        return tensor


def open_mapped_safetensors_file(path: Path) -> Any:
    """
    Map a file with the safetensors library. The caller must check for a regular file.

    Raises HeaderError if the header is invalid, and FileNotFoundError if the file was removed.
    """
    try:
        return safe_open(path, "pt")
    except RuntimeError as error:  # torch's, when it maps the file
        if not path.exists():
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(path)) from error
        raise HeaderError(str(error)) from error
    except (SafetensorError, OSError) as error:
        raise HeaderError(str(error).removeprefix("Error while deserializing header: ")) from error


def read_entries(mapped: Any) -> dict[str, TensorEntry]:
    """
    Return a mapped file's entries by name, in file order. Raises HeaderError with an unusable tensor's
    name.
    """
    entries: dict[str, TensorEntry] = {}
    end = 0
    for name in mapped.offset_keys():
        part = mapped.get_slice(name)
        if not is_valid_tensor_name(name):
            raise HeaderError(f"{name!r:.99} is not a valid name of a tensor")
        if part.get_dtype() not in DTYPES:
            raise HeaderError(f"{name} has the dtype {part.get_dtype()}, which is not supported")
        if len(part.get_shape()) > MAX_DIMENSIONS:
            raise HeaderError(f"{name} has more than {MAX_DIMENSIONS} dimensions")
        spec = TensorSpec(tuple(part.get_shape()), DTYPES[part.get_dtype()])
        start, end = end, end + spec.bytes  # the library refuses files with gaps
        entries[name] = TensorEntry(spec, start, end)
    return entries


def read_header_entries(file: RegularFile) -> tuple[int, dict[str, TensorEntry]]:
    """
    Return the header's end in a file, in bytes, and the entries by name. Raises HeaderError if the header is invalid.

    The header is read through `file` first, so a VerifiedFile verifies its digest.
    """
    length = int.from_bytes(file.read(0, min(8, file.size)), "little")
    file.read(8, min(length, max(file.size - 8, 0)))
    entries = read_entries(open_mapped_safetensors_file(file.path))
    return 8 + length, entries


def read_tensor(file: RegularFile, header_end: int, entry: TensorEntry, rows: range | None = None) -> Tensor:
    """
    Read an entry's tensor into new CPU memory; `header_end` is the byte from which the entry counts.

    `rows` selects a range in the first dimension. Checkpoints are read with this function, because a VerifiedFile
    verifies bytes as it reads them; the library's mapped file would bypass it.
    """
    spec, start = entry.spec, header_end + entry.start
    if rows is not None:
        row = TensorSpec(spec.shape[1:], spec.dtype)
        spec, start = TensorSpec((len(rows), *row.shape), row.dtype), start + rows.start * row.bytes
    tensor, memory = allocate_tensor_and_byte_view(spec)
    file.read_into(memory, start)
    return tensor


def open_safetensors_folder(folder: Path) -> SafetensorsFolder:
    """
    Read the headers from `model.safetensors`, or from the files in `model.safetensors.index.json`.

    Raises UserError with all differences between index and files, or with the invalid file and tensor. Opens only
    files in the folder.
    """
    if not os.path.isdir(folder):
        raise UserError(f"{folder} is not a folder; write the path of a Hugging Face model folder")
    if os.path.lexists(folder / SINGLE):
        single = read_safetensors_header(folder / SINGLE)
        return SafetensorsFolder(dict.fromkeys(single.specs, single))
    if not os.path.lexists(folder / INDEX):
        raise UserError(f"{folder} holds neither {SINGLE} nor {INDEX}; write the path of a Hugging Face model folder")
    files_by_tensor, total = _read_file_names(folder / INDEX)
    files = {
        file: _read_shard_header(folder, file, name)
        for file, name in {f: n for n, f in files_by_tensor.items()}.items()
    }
    if reasons := list(_find_differences(files_by_tensor, files, total)):
        raise UserError(f"{folder / INDEX} and its files differ: {'; '.join(reasons)}; copy the folder again")
    return SafetensorsFolder({name: files[file] for name, file in files_by_tensor.items()})


def read_safetensors_header(path: Path) -> SafetensorsFile:
    """Return a file's header. Raises UserError if it is invalid."""
    with open_untrusted_file(path) as file, _convert_header_errors(path):
        return SafetensorsFile(
            path,
            {name: entry.spec for name, entry in read_entries(open_mapped_safetensors_file(path)).items()},
            file.identity,
        )


def _read_shard_header(folder: Path, file: str, name: str) -> SafetensorsFile:
    """Return an indexed file's header; `name` is a tensor in the file, for messages."""
    try:
        return read_safetensors_header(folder / file)
    except UserError as error:
        raise UserError(f"{folder / INDEX} places {name!r:.99} in {file!r:.99}: {error}") from error


@contextmanager
def _convert_header_errors(path: Path) -> Iterator[None]:
    """Convert HeaderError to UserError with the path."""
    try:
        yield
    except HeaderError as error:
        raise UserError(f"{path} can't be read as safetensors: {error}; copy the file again") from error


def _read_file_names(path: Path) -> tuple[dict[str, str], int | None]:
    """
    Return file names by tensor, and the stated total size. Raises UserError unless all are plain file
    names.
    """
    with open_untrusted_file(path) as file:
        if file.size > MAX_INDEX_SIZE:
            raise UserError(
                f"{path} has {file.size} bytes, above the limit of {MAX_INDEX_SIZE} for an index; copy it again"
            )
        text = file.read(0, file.size)
    try:
        index = parse_strict_json(text, max_values=3 * MAX_TENSORS)
    except ValueError as error:
        raise UserError(f"{path} is not readable JSON: {error}; copy the file again") from error
    files_by_tensor = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files_by_tensor, dict) or not files_by_tensor:
        raise UserError(f"{path} has no weight_map; copy the file again")
    for name, file_name in files_by_tensor.items():
        if not _is_plain_file_name(file_name):
            problem = f"{path} places {name!r:.99} in {file_name!r:.99}"
            raise UserError(f"{problem}, which is not a plain file name; take another copy")
    if (count := len(set(files_by_tensor.values()))) > MAX_FILES:
        raise UserError(f"{path} names {count} files, above the limit of {MAX_FILES}; use another copy of the model")
    return files_by_tensor, _read_total_size(index, path)


def _is_plain_file_name(file: Any) -> bool:
    """Return whether this is a file name without a folder."""
    # path separators and drive letters could lead out of the folder
    if not isinstance(file, str) or file in ("", ".", "..") or not file.isprintable():
        return False
    return not set(file) & set("/\\:") and len(file.encode()) < 256


def _read_total_size(index: Mapping[str, Any], path: Path) -> int | None:
    """Return an index's stated total size, or None."""
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is None:
        return None
    if type(total) not in (int, float) or not 0 <= total < 2**63 or total != int(total):
        raise UserError(f"{path} says total_size = {total!r:.99}, which is not a number of bytes; copy the file again")
    return int(total)


def _find_differences(
    files_by_tensor: Mapping[str, str], files: Mapping[str, SafetensorsFile], total: int | None
) -> Iterator[str]:
    """Describe missing, unexpected and duplicate tensors, and a wrong total size."""
    if missing := [f"{name} (in {file})" for name, file in files_by_tensor.items() if name not in files[file].specs]:
        yield f"missing {format_names(missing)}"
    stored = [(name, file) for file, header in files.items() for name in header.specs]
    if unknown := [f"{name} (in {file})" for name, file in stored if name not in files_by_tensor]:
        yield f"unexpected {format_names(unknown)}"
    if duplicates := [f"{name} (also in {file})" for name, file in stored if files_by_tensor.get(name, file) != file]:
        yield f"duplicate {format_names(duplicates)}"
    size = sum(spec.bytes for file in files.values() for spec in file.specs.values())
    if total not in (None, size) and not missing and not unknown:
        yield f"its total_size is {total}, and the tensors have {size} bytes"
