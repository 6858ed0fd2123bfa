"""
Safetensors headers: dtypes, names, and byte ranges of tensors.

The safetensors library reads and validates headers: https://github.com/huggingface/safetensors#format.
"""

import os
import re
from collections.abc import Sequence
from errno import ENOENT
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open

from drawloom.components.storage.tensor_source import TensorSpec

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


class HeaderError(Exception):
    """Invalid safetensors header; the message has the reason."""


@attrs.frozen
class TensorEntry:
    """A tensor's spec and byte range in a file, counted from the header's end."""

    spec: TensorSpec
    start: int
    end: int


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


def is_valid_tensor_name(name: str) -> bool:
    """Return whether a tensor may have this name: it has no control characters, and can't lead outside a folder."""
    return bool(NAME.fullmatch(name)) and ".." not in name and name != METADATA
