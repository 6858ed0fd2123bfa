"""Headers: good ones, hostile ones, and never a laxer verdict than the safetensors library's."""

import gc
import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from drawloom.components.storage.safetensors.header import (
    CODES,
    DTYPES,
    MAX_PARTS,
    MAX_TENSORS,
    BadHeader,
    Entry,
    header_length,
    parse_header,
)
from drawloom.components.storage.safetensors.writer import check_writable, layout
from drawloom.components.storage.tensor_source import TensorSpec


def entries_of(file: bytes) -> dict[str, Entry]:
    """Our verdict on a file."""
    length = header_length(file[:8], len(file))
    return parse_header(file[8 : 8 + length], len(file) - 8 - length)


def file_of(header: Any, body: int = 0) -> bytes:
    """A file with this header, JSON or text, and so many bytes of tensors."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\1" * body


def tensor(dtype: Any = "U8", shape: Any = (4,), places: Any = (0, 4), **more: Any) -> dict[str, Any]:
    """The description of a tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": places, **more}


def test_every_dtype_is_the_safetensors_librarys() -> None:
    """Of each dtype, a file that the library wrote is read as what it is, and laid out as the library does it."""
    tensors = {f"t{n}": torch.zeros(n % 3, 2).to(dtype) for n, dtype in enumerate(DTYPES.values())}
    file = save(tensors)
    entries = entries_of(file)
    assert {name: entry.spec for name, entry in entries.items()} == {
        name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
    }
    head, planned = layout({name: entry.spec for name, entry in entries.items()})
    assert planned == entries
    assert (
        head.replace(b'"__metadata__":{"format":"pt"},', b"").rstrip()[8:]
        == file[8 : 8 + header_length(file[:8], len(file))].rstrip()
    )


REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "end before its header"),
    "a few bytes": (b"1234", "end before its header"),
    "longer than the file": (struct.pack("<Q", 100) + b"{}", "end before its header"),
    "longer than all files": (struct.pack("<Q", 2**64 - 1) + b"{}", "end before its header"),
    "no object": (file_of([]), "does not begin with {"),
    "spaces first": (file_of(b"  {}"), "does not begin with {"),
    "no JSON": (file_of(b"{"), "can't be read: Expecting"),
    "no UTF-8": (file_of(b'{"\xff": 1}'), "can't be read"),
    "a name twice": (file_of(b'{"a":%b,"a":%b}' % ((json.dumps(tensor()).encode(),) * 2), 4), "'a' more than once"),
    "nested": (file_of(b'{"a":' + b"[" * 100_000), "can't be read"),
    "NaN": (file_of(b'{"a":NaN}'), "NaN is not a JSON number"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), "__metadata__ is not an object of strings"),
    "metadata no object": (file_of({"__metadata__": None}), "__metadata__ is not an object of strings"),
    "half a character": (file_of({"__metadata__": {"a": "\ud800"}}), "half a character"),
    "name leads out": (file_of({"../../x": tensor()}, 4), "'../../x' is not a valid name"),
    "empty name": (file_of({"": tensor()}, 4), "'' is not a valid name"),
    "NUL in a name": (file_of({"a\0b": tensor()}, 4), "not a valid name of a tensor"),
    "long name": (file_of({"a" * 300: tensor()}, 4), "not a valid name of a tensor"),
    "no description": (file_of({"a": 7}), "a is not described"),
    "something missing": (file_of({"a": {"dtype": "U8", "shape": [4]}}, 4), "a is not described"),
    "something more": (file_of({"a": tensor(x=1)}, 4), "a is not described"),
    "unknown dtype": (file_of({"a": tensor("F3")}, 4), "a is of type 'F3'"),
    "dtype no text": (file_of({"a": tensor(7)}, 4), "a is of type 7"),
    "negative size": (file_of({"a": tensor(shape=[-4])}, 4), "-4 is negative"),
    "minus zero": (file_of(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'), "-0 is negative"),
    "broken size": (file_of({"a": tensor(shape=[4.0])}, 4), "a has no shape"),
    "true size": (file_of({"a": tensor(shape=[True], places=(0, 1))}, 1), "a has no shape"),
    "shape no list": (file_of({"a": tensor(shape=4)}, 4), "a has no shape"),
    "many dimensions": (file_of({"a": tensor(shape=[1] * 5000, places=(0, 1))}, 1), "a has no shape"),
    "three places": (file_of({"a": tensor(places=(0, 4, 4))}, 4), "a has no place"),
    "places turned round": (file_of({"a": tensor(places=(4, 0))}, 4), "a has no place"),
    "place no number": (file_of({"a": tensor(places=(0, "4"))}, 4), "a has no place"),
    "bytes do not match": (file_of({"a": tensor("F32")}, 4), "a has 4 bytes, and dtype and shape say 16"),
    "product overflows": (file_of({"a": tensor(shape=[2**62, 2**62, 0], places=(0, 0))}), "no tensor can have"),
    "vast and empty": (file_of({"a": tensor(shape=[0, 2**62, 2], places=(0, 0))}), "no tensor can have"),
    "gap": (file_of({"a": tensor(), "b": tensor(places=(5, 9))}, 9), "b does not begin where"),
    "overlap": (file_of({"a": tensor(), "b": tensor(places=(2, 6))}, 6), "b does not begin where"),
    "begins late": (file_of({"a": tensor(places=(1, 5))}, 5), "a does not begin where"),
    "bytes left over": (file_of({"a": tensor()}, 5), "need 4 bytes, and it has 5"),
    "bytes missing": (file_of({"a": tensor()}, 3), "need 4 bytes, and it has 3"),
    "far outside": (file_of({"a": tensor(shape=[2**60], places=(0, 2**60))}, 3), "and it has 3"),
}


@pytest.mark.parametrize(("file", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_malformed_headers_are_refused(file: bytes, message: str) -> None:
    """An invalid header is refused, with the name of the tensor if it is invalid because of one."""
    with pytest.raises(BadHeader) as caught:
        entries_of(file)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


def cost(file: bytes) -> float:
    """Seconds of this process until a file is refused; what other tests have left behind is not looked through."""
    gc.freeze()
    began = time.process_time()
    with pytest.raises(BadHeader):
        entries_of(file)
    seconds = time.process_time() - began
    return seconds


def many(count: int) -> bytes:
    """A file of so many empty tensors."""
    entry = b'"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return file_of(b"{" + b",".join(entry % number for number in range(count)) + b"}")


BOMBS: dict[str, Callable[[], bytes]] = {
    "a million tensors": lambda: many(10**6),
    "too many small ones": lambda: many(MAX_TENSORS + 1),
    "spaces": lambda: file_of(b"{" + b" " * 99_000_000 + b"}"),
    "brackets": lambda: file_of(b'{"a":' + b"[" * (15 * 2**20)),
    "empty lists": lambda: file_of(b'{"a":[' + b"[]," * (5 * 2**20) + b"0]}"),
    "empty names": lambda: file_of(b"{" + b'"":0,' * (MAX_PARTS // 2 - 1) + b'"":0}'),
    "long numbers": lambda: file_of(b'{"a":[' + b"9" * 4000 + (b"," + b"9" * 4000) * 4000 + b"]}"),
    "empty lists that are few enough": lambda: file_of(b'{"a":[' + b"[]," * (MAX_PARTS // 2 - 2) + b"0]}"),
    "sizes": lambda: file_of(b'{"a":{"dtype":"U8","shape":[' + b"1," * (7 * 2**20) + b"1]}}"),
    "digits": lambda: file_of(b'{"a":{"dtype":"U8","shape":[' + b"9" * (15 * 2**20) + b"]}}"),
    "metadata": lambda: file_of(b'{"__metadata__":{' + b",".join(b'"%d":""' % n for n in range(1001)) + b"}}"),
    "one long text": lambda: file_of(b'{"' + b"a" * (15 * 2**20) + b'":1}'),
    "the last is bad": lambda: many(MAX_TENSORS).replace(b'"t49999":{"dtype":"U8"', b'"t49999":{"dtype":"UU"'),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_huge_headers_are_refused_in_little_time_and_memory(bomb: Callable[[], bytes]) -> None:
    """The worst headers that fit are refused within a second and within 200 MB."""
    file = bomb()
    assert any(cost(file) < 1 for _ in range(3))  # a busy machine may be slow once
    tracemalloc.start()
    with pytest.raises(BadHeader):
        entries_of(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200e6


def agrees(file: bytes) -> bool:
    """Whether we accept a file; if so, the library must, and read the same."""
    try:
        entries = entries_of(file)
    except BadHeader:
        return False
    theirs = dict(safetensors.deserialize(file))  # type: ignore[no-untyped-call]
    assert theirs.keys() == entries.keys()
    begin = 8 + header_length(file[:8], len(file))
    for name, entry in entries.items():
        assert tuple(theirs[name]["shape"]) == entry.spec.shape
        assert theirs[name]["dtype"] == CODES[entry.spec.dtype]
        assert bytes(theirs[name]["data"]) == file[begin + entry.start : begin + entry.end]
    return True


GOOD = save(
    {"a": torch.arange(6.0).view(2, 3), "b.c": torch.ones(3, dtype=torch.bool), "d": torch.zeros(0, 2)}, {"k": "v"}
)


def test_a_good_file_is_accepted() -> None:
    """The file that the other tests corrupt is valid."""
    assert agrees(GOOD)


@given(st.binary(max_size=200))
def test_any_bytes_are_accepted_or_refused(data: bytes) -> None:
    """No bytes raise anything else, with or without a length that fits."""
    agrees(data)
    agrees(struct.pack("<Q", len(data)) + data)


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_never_laxer_on_flipped_bytes(changes: list[tuple[int, int]]) -> None:
    """Of a file with some bytes changed, what we accept the library accepts, with the same contents."""
    changed = bytearray(GOOD)
    for place, value in changes:
        changed[place] = value
    agrees(bytes(changed))


@given(st.integers(0, len(GOOD)), st.integers(0, len(GOOD)), st.binary(max_size=6))
def test_never_laxer_on_cuts_and_insertions(start: int, end: int, middle: bytes) -> None:
    """The same for pieces cut out and put in."""
    agrees(GOOD[:start] + middle + GOOD[end:])


ODD: st.SearchStrategy[Any] = st.sampled_from(
    [-1, 0, 1, 2, 3, 4, 8, 2**31, 2**63, 2**64, 1.0, 1e3, True, None, "", "4", [], {}, [1], -0.0]
)
SIZES = st.integers(0, 6) | ODD
DESCRIPTIONS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F4", "f32", "", None]),
        "shape": st.lists(SIZES, max_size=3) | ODD,
        "data_offsets": st.lists(SIZES, min_size=1, max_size=3) | ODD,
    },
    optional={"extra": ODD},
)
HEADERS = st.dictionaries(st.text("ab./_", max_size=3) | st.just("__metadata__"), DESCRIPTIONS | ODD, max_size=4)


@given(HEADERS, st.integers(0, 40))
def test_never_laxer_on_made_up_headers(header: dict[str, Any], body: int) -> None:
    """The same for headers of the right form and of nearly the right form."""
    agrees(file_of(header, body))


@given(st.lists(st.tuples(st.sampled_from([*DTYPES]), st.lists(st.integers(0, 3), max_size=4)), max_size=5))
def test_every_header_that_the_writer_makes_is_accepted(kinds: list[tuple[str, list[int]]]) -> None:
    """Our parser and the safetensors library accept every header that the writer makes."""
    head, entries = layout({f"t{n}": TensorSpec(tuple(s), DTYPES[code]) for n, (code, s) in enumerate(kinds)})
    assert agrees(head + bytes(max((entry.end for entry in entries.values()), default=0)))


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
    """The same rules hold for what we write."""
    with pytest.raises(ValueError, match=message):
        check_writable({name: kind})
