"""What one rank hands to another: a tree of what JSON can say, and the tensors that stood in it, by number."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor

from drawloom.components.storage.strict_json import parse

MARK = "$tensor"
"""In the tree a tensor is {"$tensor": "0"}, with its name among the tensors."""

MAX_PARTS = 4_000_000  # of JSON: more than a model's configuration has, and still below a gigabyte of memory


@attrs.frozen
class Parcel:
    """A tree, and the tensors that it names."""

    tree: Any
    tensors: Mapping[str, Tensor]


def pack(config: Any) -> Parcel:
    """A configuration of what JSON can say and of tensors, apart. TypeError says where something else stands."""
    tensors: dict[str, Tensor] = {}
    return Parcel(_apart(config, "config", tensors), tensors)


def unpack(parcel: Parcel) -> Any:
    """The configuration again; ValueError if tree and tensors don't belong together."""
    if {*_named(parcel.tree)} != parcel.tensors.keys():
        raise ValueError("a configuration names other tensors than came with it")
    return _whole(parcel.tree, parcel.tensors)


def encode(tree: Any) -> bytes:
    """A tree as JSON in one fixed way of writing; ValueError for numbers that JSON has no word for."""
    return json.dumps(tree, allow_nan=False, separators=(",", ":"), sort_keys=True).encode()


def decode(text: bytes) -> Any:
    """The tree of a JSON text; ValueError if it is none, or too large."""
    return parse(text, most=MAX_PARTS)


def _apart(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {MARK: name}
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str) or key == MARK]:
            raise TypeError(f"{where} has the key {wrong[0]!r}; keys are strings, and not {MARK!r}")
        return {key: _apart(part, f"{where}.{key}", tensors) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_apart(part, f"{where}[{place}]", tensors) for place, part in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{where} is a {type(value).__name__}; it may hold what JSON can say, and tensors")


def _whole(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_whole(part, tensors) for part in tree]
    if not isinstance(tree, dict):
        return tree
    return tensors[tree[MARK]] if MARK in tree else {key: _whole(part, tensors) for key, part in tree.items()}


def _named(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict) and MARK in tree:
        yield tree[MARK]
    elif isinstance(tree, dict | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _named(part)
