"""
One rank's place in a shared folder: `rank-3.json`, and the tensors that it names, `rank-3-GENERATION.safetensors`.

The JSON is renamed into place when all is on disk, and carries its own digest and that of the tensors. Network storage
may show a reader an older state for a while, or take away a file that was replaced: the reader tries again then.
"""

import errno
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drawloom.components.storage.atomic_write import flush
from drawloom.components.storage.regular_file import open_regular_file
from drawloom.components.storage.safetensors.header import BadHeader
from drawloom.components.storage.safetensors.writer import new_safetensors_file, tensors_in
from drawloom.components.storage.tensor_bytes import bytes_of, view
from drawloom.components.storage.tensor_source import InMemory
from drawloom.components.workspace.tensor_json import Parcel, decode, encode
from drawloom.graph import UserError

FORMAT = 1
MAX_JSON = 256 * 2**20  # bytes
PATIENCE = 30.0  # seconds; network storage shows old names for three, mostly
PAUSE = 0.05  # seconds between two looks
REMEDY = "remove the folder, and begin again"


class NotYet(UserError):
    """What is looked for is not to be seen, and may be soon."""


def publish(folder: Path, rank: int, parcel: Parcel) -> str:
    """
    Put a parcel into a rank's place, instead of what was there; the name of this generation.

    ValueError if a tensor, or a number, can't be written so that it can be read again.
    """
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in parcel.tensors.items()}
    generation = secrets.token_hex(8)
    size, digest = _write_tensors(folder / _tensors_name(rank, generation), dense)
    tensors = {"size": size, "sha256": digest}
    record = {"format": FORMAT, "rank": rank, "generation": generation, "tensors": tensors, "config": parcel.tree}
    _replace(folder / f"rank-{rank}.json", encode({**record, "digest": _digest(record)}))
    for path in _own(folder, rank):
        if generation not in path.name and path.suffix == ".safetensors":
            path.unlink(missing_ok=True)
    return generation


def read(folder: Path, rank: int, generation: str | None = None) -> Parcel | None:
    """
    What is in a rank's place, None if nothing is; with a generation that one, as soon as it is to be seen.

    UserError if it is damaged, or does not show itself for so long that it never will.
    """
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return _read(folder, rank, generation)
        except NotYet:
            if time.monotonic() > end:
                raise
        time.sleep(PAUSE)
        os.listdir(folder)  # makes network storage ask the server again


def withdraw(folder: Path, rank: int) -> None:
    """Empty a rank's place: the JSON first, so that nobody looks for the rest."""
    for path in sorted(_own(folder, rank)):
        path.unlink(missing_ok=True)


def _read(folder: Path, rank: int, generation: str | None) -> Parcel | None:
    path = folder / f"rank-{rank}.json"
    record = _record(path, rank)
    if record is None and generation is None:
        return None
    if record is None or generation not in (None, record["generation"]):
        raise NotYet(f"{path} does not show what rank {rank} wrote; do all ranks see the same folder there?")
    name = _tensors_name(rank, record["generation"])
    return Parcel(record["config"], _tensors(folder / name, record["tensors"]))


def _record(path: Path, rank: int) -> dict[str, Any] | None:
    """A record that has its own digest, None if there is no file."""
    try:
        with open_regular_file(path, REMEDY) as file:
            text = file.read(0, min(file.size, MAX_JSON + 1))
    except UserError as error:
        if _is_gone(error):
            return None
        raise
    try:
        if len(text) > MAX_JSON:
            raise ValueError(f"it has more than {MAX_JSON} bytes")
        record = decode(text)
        if record.pop("digest") != _digest(record):
            raise ValueError("it does not have its own digest")
        if (record["format"], record["rank"]) != (FORMAT, rank):
            raise ValueError(f"it is of format {record['format']} and rank {record['rank']}")
        if not re.fullmatch("[0-9a-f]{16}", record["generation"]) or record["tensors"].keys() != {"size", "sha256"}:
            raise ValueError("it names no tensors")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not as it was written: {error}; {REMEDY}") from error
    return dict(record)


def _tensors(path: Path, expected: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        with open_regular_file(path, REMEDY) as file:
            if file.size != expected["size"]:
                raise UserError(f"{path} has {file.size} bytes instead of {expected['size']}; {REMEDY}")
            memory = torch.empty(file.size, dtype=torch.uint8)
            file.read_into(view(memory), 0)
    except UserError as error:
        if _is_gone(error):
            raise NotYet(f"{path} is not there, though its rank wrote it; {REMEDY}") from error
        raise
    try:
        if hashlib.sha256(view(memory)).hexdigest() != expected["sha256"]:
            raise BadHeader("it has other bytes than were written")
        return tensors_in(memory)
    except BadHeader as error:
        raise UserError(f"{path} is not as it was written: {error}; {REMEDY}") from error


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write a file; its size, and the digest of what was meant to be in it."""
    with new_safetensors_file(path, InMemory(tensors).kinds()) as writer:
        digest = hashlib.sha256(writer.head)
        for name in [*writer.missing]:  # in the order in which they lie in the file
            digest.update(bytes_of(tensors[name]))
            writer.write(name, tensors[name])
    return len(writer.head) + sum(tensor.nbytes for tensor in tensors.values()), digest.hexdigest()


def _replace(path: Path, data: bytes) -> None:
    """Put a file in the place of another, at once, and on disk."""
    aside = path.with_suffix(".json.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        flush(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _own(folder: Path, rank: int) -> Iterator[Path]:
    """The files in a rank's place, whoever wrote them."""
    place = re.compile(rf"rank-{rank}(\.json|\.json\.tmp|-[0-9a-f]{{16}}\.safetensors)")
    yield from (folder / name for name in os.listdir(folder) if place.fullmatch(name))


def _tensors_name(rank: int, generation: str) -> str:
    return f"rank-{rank}-{generation}.safetensors"


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(encode(record)).hexdigest()


def _is_gone(error: UserError) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOENT, errno.ESTALE)
