"""
Safetensors format: dtypes, names and byte ranges; and a writer for files, tensor by tensor in any order.

https://github.com/huggingface/safetensors#format. The library's `save_file` needs all tensors at once, and neither
hashes nor flushes them. An export streams one tensor group at a time, regardless of the file size, and a checkpoint
needs digests and durability. Files equal the library's byte for byte.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.storage import durable_files
from drawloom.components.storage.durable_files import FileDigest, FileWriter
from drawloom.components.storage.tensor_source import TensorSpec, view_bytes

MAX_NAMES_SHOWN = 10


def format_names(names: Sequence[str]) -> str:
    """Return the first MAX_NAMES_SHOWN names, and how many others there are."""
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more


DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""dtypes by code, in the order of the safetensors library: wide elements first, so that every tensor is aligned."""

CODES = {dtype: code for code, dtype in DTYPES.items()}

NAME = re.compile(r"[A-Za-z0-9_.\-/]{1,256}")
METADATA = "__metadata__"
MAX_DIMENSIONS = 8


@attrs.frozen
class TensorEntry:
    """A tensor's spec and byte range in a file, counted from the header's end."""

    spec: TensorSpec
    start: int
    end: int


@attrs.define
class SafetensorsWriter:
    """Writer for planned tensors at their offsets in an open file; `missing` has the unwritten ones, in file order."""

    file: FileWriter
    begin: int
    missing: dict[str, TensorEntry]

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor. Raises ValueError if its shape or dtype differs from the plan."""
        entry = self.missing.pop(name)
        actual = TensorSpec(tuple(tensor.shape), tensor.dtype)
        if actual != entry.spec:
            raise ValueError(f"{name} has {actual}, but was planned with {entry.spec}")
        self.file.write_at(view_bytes(tensor), self.begin + entry.start)


@contextmanager
def create_safetensors_file(path: Path, specs: Mapping[str, TensorSpec]) -> Iterator[SafetensorsWriter]:
    """Create a file for these tensors, and flush it to disk when the context ends. Raises OSError if it exists."""
    # before the file is created, because it refuses tensors that can't be written
    head, entries = build_header_and_entries(specs)
    with durable_files.create_new_durable_file(path) as file:
        file.write_at(memoryview(head), 0)
        writer = SafetensorsWriter(file, len(head), entries)
        yield writer
        if writer.missing:
            raise ValueError(f"{format_names(list(writer.missing))} were planned, but not written")


def write_safetensors_file(path: Path, tensors: Mapping[str, Tensor]) -> FileDigest:
    """Create and flush a file with tensors, any shape and dtype. Raises OSError if it exists."""
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    with create_safetensors_file(path, specs) as writer:
        for name in [*writer.missing]:  # from start to end, so that the file can be hashed
            writer.write(name, tensors[name])
    return writer.file.sha256.finish()


def build_header_and_entries(specs: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, TensorEntry]]:
    """
    Return the header for a file with these tensors, with its length, and the entries in file order.

    The order is the safetensors library's: by dtype, the widest first, then by name.
    """
    check_writable(specs)
    ranks = {dtype: rank for rank, dtype in enumerate(CODES)}
    entries: dict[str, TensorEntry] = {}
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name in sorted(specs, key=lambda name: (ranks[specs[name].dtype], name)):
        start, end = end, end + specs[name].bytes
        entries[name] = TensorEntry(specs[name], start, end)
        header[name] = {"dtype": CODES[specs[name].dtype], "shape": specs[name].shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text, entries


def check_writable(specs: Mapping[str, TensorSpec]) -> None:
    """Raise ValueError for a tensor that the format does not support, or the reader would refuse."""
    for name, spec in specs.items():
        if not is_valid_tensor_name(name):
            raise ValueError(f"{name!r:.99} is not a valid name of a tensor")
        if spec.dtype not in CODES:
            raise ValueError(f"{name} has the dtype {spec.dtype}, which the safetensors format does not support")
        if len(spec.shape) > MAX_DIMENSIONS:
            raise ValueError(f"{name} has {len(spec.shape)} dimensions, above the limit of {MAX_DIMENSIONS}")


def is_valid_tensor_name(name: str) -> bool:
    """Return whether a tensor may have this name: it has no control characters, and can't lead outside a folder."""
    return bool(NAME.fullmatch(name)) and ".." not in name and name != METADATA
