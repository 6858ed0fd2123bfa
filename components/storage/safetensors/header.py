"""
Parses and validates the header of a safetensors file.

A file is the length of the header (8 bytes, little-endian), the header (JSON: tensor name to dtype, shape and offsets)
and the bytes of the tensors without gaps: https://github.com/huggingface/safetensors#format. The safetensors library
validates less, takes time quadratic in the number of tensors, and blocks on pipes; it accepts every file that is
accepted here, and reads the same tensors.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from drawloom.components.storage.strict_json import natural, parse
from drawloom.components.storage.tensor_source import TensorSpec

SHOWN = 10  # names that a message lists


def format_names(names: Sequence[str]) -> str:
    """The first SHOWN names, and the number of the others."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


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
"""In the order of the safetensors library: wide elements first, so that each tensor is aligned to its element size."""

CODES = {dtype: code for code, dtype in DTYPES.items()}

MAX_HEADER = 16 * 2**20  # bytes
MAX_TENSORS = 50_000  # in a file; a header of so many is read in less than a second
MAX_PARTS = 14 * MAX_TENSORS  # a tensor of four dimensions has 14 of the characters that `parse` counts
MAX_METADATA = 1000
MAX_DIMENSIONS = 8
MAX_BYTES = 2**62  # of a tensor, dimensions of size 0 left out: beyond, products overflow
NAME = re.compile(r"[A-Za-z0-9_.\-/]{1,256}")
METADATA = "__metadata__"


class BadHeader(Exception):
    """The header of a safetensors file is invalid; the message says why."""


@attrs.frozen
class Entry:
    """A tensor in a file: its spec, and the range of its bytes, counted from the end of the header."""

    spec: TensorSpec
    start: int
    end: int


def parse_header(text: bytes, size: int) -> dict[str, Entry]:
    """The entries of a header by tensor name; `size` bytes follow the header. BadHeader names an invalid tensor."""
    if not text.startswith(b"{"):
        raise BadHeader("its header does not begin with {")
    try:
        header = parse(text, most=MAX_PARTS, integer=natural)
    except ValueError as error:
        raise BadHeader(f"its header can't be read: {error}") from error
    _check_metadata(header.pop(METADATA, {}))
    if len(header) > MAX_TENSORS:
        raise BadHeader(f"it has {len(header)} tensors, and more than {MAX_TENSORS} in a file are not read")
    entries = {name: _entry(name, content) for name, content in header.items()}
    _check_places(entries, size)
    return entries


def header_length(first: bytes, size: int) -> int:
    """The length of the header of a file of this size, from its first 8 bytes; BadHeader if it can't be."""
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > size - 8:
        raise BadHeader(f"its {size} bytes end before its header does")
    if length > MAX_HEADER:
        raise BadHeader(f"its header has {length} bytes, and more than {MAX_HEADER} are not read")
    return length


def is_name(name: str) -> bool:
    """Whether a tensor may have this name: no control characters, and no way out of a folder."""
    return bool(NAME.fullmatch(name)) and ".." not in name and name != METADATA


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadHeader(f"its {METADATA} is not an object of strings")
    if len(metadata) > MAX_METADATA:
        raise BadHeader(f"its {METADATA} has {len(metadata)} entries, and more than {MAX_METADATA} are not read")
    try:
        "".join([*metadata, *metadata.values()]).encode()
    except UnicodeEncodeError:
        raise BadHeader(f"its {METADATA} holds half a character") from None


def _entry(name: str, content: Any) -> Entry:
    if not is_name(name):
        raise BadHeader(f"{name!r:.99} is not a valid name of a tensor")
    if not isinstance(content, dict) or content.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadHeader(f"{name} is not described by dtype, shape and data_offsets alone")
    code, shape, places = content["dtype"], content["shape"], content["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise BadHeader(f"{name} is of type {code!r:.99}, which can't be read")
    if not _naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise BadHeader(f"{name} has no shape of at most {MAX_DIMENSIONS} dimensions")
    if not _naturals(places) or len(places) != 2 or places[0] > places[1]:
        raise BadHeader(f"{name} has no place between two data_offsets")
    entry = Entry(TensorSpec(tuple(shape), DTYPES[code]), *places)
    if entry.spec.bytes != entry.end - entry.start:
        raise BadHeader(f"{name} has {entry.end - entry.start} bytes, and dtype and shape say {entry.spec.bytes}")
    if math.prod(filter(None, shape)) * entry.spec.dtype.itemsize > MAX_BYTES:
        raise BadHeader(f"{name} has dimensions that no tensor can have")
    return entry


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and {*map(type, values)} <= {int}


def _check_places(entries: Mapping[str, Entry], size: int) -> None:
    """BadHeader unless every byte belongs to exactly one tensor: gaps could hide data, overlaps alias tensors."""
    end = 0
    for start, next_end, name in sorted((entry.start, entry.end, name) for name, entry in entries.items()):
        if start != end:
            raise BadHeader(f"{name} does not begin where the tensor before it ends, at byte {end}")
        end = next_end
    if end != size:
        raise BadHeader(f"its tensors need {end} bytes, and it has {size}")
