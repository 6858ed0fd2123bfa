"""
Writer for safetensors files, tensor by tensor in any order.

The library's `save_file` needs all tensors at once, and neither hashes nor flushes them. An export streams one tensor
group at a time, regardless of the file size, and a checkpoint needs digests and durability. Files equal the
library's byte for byte.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from drawloom.components.storage import durable_files
from drawloom.components.storage.durable_files import FileDigest, FileWriter
from drawloom.components.storage.safetensors.header import (
    CODES,
    MAX_DIMENSIONS,
    METADATA,
    TensorEntry,
    format_names,
    is_valid_tensor_name,
)
from drawloom.components.storage.tensor_source import TensorSpec, view_bytes


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
