"""Headers: readable, refused, and written ones equal to the library's."""

import json
import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from drawloom.components.storage.safetensors.reader import HeaderError, open_mapped_safetensors_file, read_entries
from drawloom.components.storage.safetensors.writer import (
    CODES,
    DTYPES,
    TensorEntry,
    build_header_and_entries,
    check_writable,
)
from drawloom.components.storage.tensor_source import TensorSpec


def entries_of(path: Path, content: bytes) -> dict[str, TensorEntry]:
    """Return the entries of a file with this content."""
    path.write_bytes(content)
    return read_entries(open_mapped_safetensors_file(path))


def file_of(header: Any, body: int = 0) -> bytes:
    """Return a file with this header, JSON or text, and so many bytes of tensors."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\1" * body


def tensor(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    """Return the description of a tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_entries_of_every_dtype_agree_with_the_library(tmp_path: Path) -> None:
    """In files written by the library, specs and byte ranges are found for all dtypes."""
    tensors = {f"t{n}": torch.zeros(n % 3, 2).to(dtype) for n, dtype in enumerate(DTYPES.values())}
    content = save(tensors)
    entries = entries_of(tmp_path / "file", content)
    assert {name: entry.spec for name, entry in entries.items()} == {
        name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
    }
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert {name: [entry.start, entry.end] for name, entry in entries.items()} == {
        name: described["data_offsets"] for name, described in header.items()
    }


REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "header too small"),
    "longer than the file": (struct.pack("<Q", 100) + b"{}", "invalid header length"),
    "longer than all files": (struct.pack("<Q", 2**64 - 1) + b"{}", "header too large"),
    "no JSON": (file_of(b"{"), "invalid JSON in header"),
    "nested": (file_of(b'{"a":' + b"[" * 100_000), "invalid JSON in header"),
    "name leads out": (file_of({"../../x": tensor()}, 4), "'../../x' is not a valid name"),
    "escape in a name": (file_of({"a\33[2J": tensor()}, 4), "not a valid name of a tensor"),
    "unknown dtype": (file_of({"a": tensor("F3")}, 4), "unknown variant `F3`"),
    "dtype without bytes": (file_of({"a": tensor("F4", (8,))}, 4), "a has the dtype F4, which is not supported"),
    "many dimensions": (file_of({"a": tensor(shape=[1] * 5000, offsets=(0, 1))}, 1), "more than 8 dimensions"),
    "gap": (file_of({"a": tensor(), "b": tensor(offsets=(5, 9))}, 9), "invalid offset for tensor `b`"),
    "overlap": (file_of({"a": tensor(), "b": tensor(offsets=(2, 6))}, 6), "invalid offset for tensor `b`"),
    "bytes left over": (file_of({"a": tensor()}, 5), "file not fully covered"),
    "bytes missing": (file_of({"a": tensor()}, 3), "file not fully covered"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_malformed_headers_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """An invalid header is a HeaderError with the reason, in one short line."""
    with pytest.raises(HeaderError) as caught:
        entries_of(tmp_path / "file", content)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


@given(st.lists(st.tuples(st.sampled_from([*DTYPES]), st.lists(st.integers(0, 3), max_size=4)), max_size=5))
def test_the_library_accepts_every_written_header(kinds: list[tuple[str, list[int]]]) -> None:
    """The library finds the shapes and dtypes passed to the writer."""
    specs = {f"t{n}": TensorSpec(tuple(s), DTYPES[code]) for n, (code, s) in enumerate(kinds)}
    head, entries = build_header_and_entries(specs)
    with TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(head + bytes(max((entry.end for entry in entries.values()), default=0)))
        opened: Any = safe_open(path, "pt")
        slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
    assert {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()} == {
        name: ([*spec.shape], CODES[spec.dtype]) for name, spec in specs.items()
    }


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("../a", TensorSpec((1,), torch.float32), "not a valid name of a tensor"),
        ("__metadata__", TensorSpec((1,), torch.float32), "not a valid name of a tensor"),
        ("a", TensorSpec((1,), torch.complex128), "has the dtype torch.complex128"),
        ("a", TensorSpec((1,) * 9, torch.float32), "has 9 dimensions"),
    ],
)
def test_tensors_that_could_not_be_read_are_not_written(name: str, kind: TensorSpec, message: str) -> None:
    """The rules for reading hold for writing."""
    with pytest.raises(ValueError, match=message):
        check_writable({name: kind})
