"""
Records in a shared folder: `rank-3.json`, and its tensors, `rank-3-GENERATION.safetensors`.

The JSON is renamed to its name when everything is on disk, and has checksums for itself and for the tensors. Network
storage may show a reader an older state for a while, or remove a replaced file while it is read; the reader then
retries.
"""

import errno
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from drawloom.components.storage.durable_files import derive_temporary_path, replace_file
from drawloom.components.storage.regular_file import ContentMismatchError, open_file_to_verify, open_untrusted_file
from drawloom.components.storage.safetensors.writer import write_safetensors_file
from drawloom.components.storage.sha256_stream import FileDigest
from drawloom.components.storage.state_tree import PackedState
from drawloom.components.storage.strict_json import encode_canonical, hash_canonical, parse_strict_json
from drawloom.graph import UserError

FORMAT = 1
MAX_JSON_SIZE = 256 * 2**20  # bytes
MAX_PARTS = 4_000_000  # of JSON; more than any model configuration has, and less than 1 GB of memory
READ_TIMEOUT = 30.0  # seconds; NFS clients cache attributes for 3 to 60 s (acregmin, acdirmax)
PAUSE = 0.05  # seconds between attempts
REMEDY = "remove the folder, and begin again, on storage that all nodes share"
REMOVED_ERRNOS = (errno.ENOENT, errno.ESTALE)  # ESTALE: another NFS client removed the file while it was open here


class NotVisibleError(UserError):
    """A record that is not visible yet; the reader retries."""


def publish_record(folder: Path, rank: int, packed: PackedState) -> str:
    """
    Replace a rank's record, and return the new generation's name.

    Raises ValueError for a tensor without a safetensors format.
    """
    generation = secrets.token_hex(8)
    tensors = attrs.asdict(write_safetensors_file(folder / _tensors_name(rank, generation), packed.tensors))
    record = {"format": FORMAT, "rank": rank, "generation": generation, "tensors": tensors, "config": packed.tree}
    replace_file(_record_path(folder, rank), encode_canonical({**record, "digest": hash_canonical(record)}))
    for path in _iterate_record_files(folder, rank):
        if generation not in path.name and path.suffix == ".safetensors":
            path.unlink(missing_ok=True)
    return generation


def read_record(folder: Path, rank: int, awaited_generation: str | None = None) -> PackedState | None:
    """
    Return a rank's record, or None if there is none; with `awaited_generation`, wait until it is visible.

    Raises UserError if it is corrupt, or not visible after READ_TIMEOUT.
    """
    end = time.monotonic() + READ_TIMEOUT
    while True:
        try:
            return _read_visible_record(folder, rank, awaited_generation)
        except NotVisibleError:
            if time.monotonic() > end:
                raise
        time.sleep(PAUSE)
        os.listdir(folder)  # makes an NFS client ask the server again


def remove_record(folder: Path, rank: int) -> None:
    """Remove a rank's record; the JSON first, so no reader looks for removed tensors."""
    for path in sorted(_iterate_record_files(folder, rank), key=lambda path: path.suffix == ".safetensors"):
        path.unlink(missing_ok=True)


def _read_visible_record(folder: Path, rank: int, awaited_generation: str | None) -> PackedState | None:
    """
    Return a rank's record, or None if there is none. Raises NotVisibleError until `awaited_generation` is visible.
    """
    path = _record_path(folder, rank)
    record = _read_record_json(path, rank)
    if record is None and awaited_generation is None:
        return None
    if record is None or awaited_generation not in (None, record["generation"]):
        raise NotVisibleError(
            f"{path} does not contain the record written by rank {rank}; do all ranks see the same folder there?"
        )
    name = _tensors_name(rank, record["generation"])
    return PackedState(record["config"], _read_tensors(folder / name, FileDigest(**record["tensors"])))


def _read_record_json(path: Path, rank: int) -> dict[str, Any] | None:
    """Return a rank's record, or None if there is no file. Raises UserError for a corrupt record."""
    try:
        with open_untrusted_file(path, REMEDY) as file:
            text = file.read(0, min(file.size, MAX_JSON_SIZE + 1))
    except UserError as error:
        if _was_file_removed(error):
            return None
        raise
    try:
        if len(text) > MAX_JSON_SIZE:
            raise ValueError(f"the record has more than {MAX_JSON_SIZE} bytes")
        record = parse_strict_json(text, max_values=MAX_PARTS)
        if record.pop("digest") != hash_canonical(record):
            raise ValueError("its digest does not match its content")
        if (record["format"], record["rank"]) != (FORMAT, rank):
            raise ValueError(
                f"it is rank {record['rank']}'s in format {record['format']}, not rank {rank}'s in format {FORMAT}"
            )
        if not re.fullmatch("[0-9a-f]{16}", record["generation"]) or record["tensors"].keys() != {"size", "blocks"}:
            raise ValueError("its generation or its list of tensors is invalid")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is corrupt: {error}; {REMEDY}") from error
    return dict(record)


def _read_tensors(path: Path, expected: FileDigest) -> dict[str, Tensor]:
    """Read a tensor file and verify its size and checksums. Raises NotVisibleError if it is missing."""
    try:
        with open_file_to_verify(path, expected) as file:
            return load(file.read(0, file.size))
    except ContentMismatchError as error:
        raise UserError(f"{path} is corrupt: it {error}; {REMEDY}") from error
    except SafetensorError as error:
        raise UserError(f"{path} is corrupt: {error}; {REMEDY}") from error
    except OSError as error:
        if error.errno in REMOVED_ERRNOS:
            raise NotVisibleError(f"{path} is missing, though its rank wrote it; {REMEDY}") from error
        raise UserError(f"{path} can't be read ({error.strerror}); make it readable, and start again") from error


def _iterate_record_files(folder: Path, rank: int) -> Iterator[Path]:
    """Yield a rank's files, including leftovers from killed processes."""
    record = _record_path(folder, rank)
    names = {record.name, derive_temporary_path(record).name}
    tensors = re.compile(rf"rank-{rank}-[0-9a-f]{{16}}\.safetensors")
    yield from (folder / name for name in os.listdir(folder) if name in names or tensors.fullmatch(name))


def _record_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _tensors_name(rank: int, generation: str) -> str:
    return f"rank-{rank}-{generation}.safetensors"


def _was_file_removed(error: UserError) -> bool:
    """Return whether an error was caused by a file's removal by another process."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in REMOVED_ERRNOS
