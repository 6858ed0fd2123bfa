"""
File format for state dicts: a JSON tree, and tensors by name.

In the tree a dict is {"dict": {...}}, a tuple {"tuple": [...]}, a tensor {"tensor": its name}, a slice of a tensor
{"slice": {"tensor": its name, "shape": of the whole, "offsets": ..., "size": ...}}, and a float that JSON can't
represent {"float": "nan"}; all other values are unchanged. A tensor's name is its path joined by slashes, or a slash
and a number if the path has characters forbidden in tensor names.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import attrs
from torch import Tensor

from drawloom.ports import SlicedTensor, TensorSlice

Tree = Any
"""A JSON value."""

NAME_PART = re.compile(r"[A-Za-z0-9_.\-]+")
MAX_NAME_LENGTH = 256  # characters


class PackedState(NamedTuple):
    """Tree, with the tensors named in it."""

    tree: Tree
    tensors: dict[str, Tensor]


def pack_state(state: Any) -> PackedState:
    """
    Split a state into a JSON tree, with tensor names as leaves, and distinct tensors by name, which are not copied.

    Raises TypeError with the path to a value that `unpack_state` would not restore exactly.
    """
    packer = _Packer()
    return PackedState(packer.pack(state, ()), packer.tensors)


def unpack_state(tree: Tree, tensors: Mapping[str, Tensor | SlicedTensor]) -> Any:
    """
    Return the state from a tree and its tensors, whole or slices, of any shape; nothing is copied.

    Raises ValueError with all missing and unexpected names if the tree names other tensors.
    """
    expected = tensor_names(tree)
    missing, extra = expected - tensors.keys(), tensors.keys() - expected
    if missing or extra:
        lists = [("missing", missing), ("unexpected", extra)]
        raise ValueError("; ".join(f"{kind} {', '.join(sorted(names))}" for kind, names in lists if names))
    return _unpack_value(tree, tensors)


def tensor_names(tree: Tree) -> set[str]:
    """Return all tensor names in a tree."""
    return {name for name, _ in iterate_tensor_names_and_slices(tree)}


def iterate_tensor_names_and_slices(tree: Tree) -> Iterator[tuple[str, TensorSlice | None]]:
    """Yield (tensor name, slice) for every tensor in a tree; None for a whole tensor."""
    if isinstance(tree, list):
        for part in tree:
            yield from iterate_tensor_names_and_slices(part)
    elif isinstance(tree, dict):
        [(kind, content)] = tree.items()
        if kind == "tensor":
            yield content, None
        elif kind == "slice":
            yield content["tensor"], _parse_slice(content)
        else:
            yield from iterate_tensor_names_and_slices([*content.values()] if kind == "dict" else content)


def list_dict_entries(tree: Tree) -> dict[str, Tree]:
    """Return the entries in a dict's tree. Raises ValueError for another tree."""
    content = tree.get("dict") if isinstance(tree, dict) else None
    if not isinstance(content, dict):
        raise ValueError("the saved state is not a dict")
    return content


@attrs.define
class _Packer:
    """Converter from a state to a JSON tree with names in place of tensors; `tensors` has the tensors by name."""

    tensors: dict[str, Tensor] = attrs.field(factory=dict)
    _names: dict[Any, str] = attrs.field(factory=dict)  # by the memory and layout of the tensors

    def pack(self, value: Any, path: tuple[Any, ...]) -> Tree:
        if isinstance(value, Tensor):
            return {"tensor": self._register_tensor(value.detach(), path)}
        if isinstance(value, SlicedTensor):
            name, part = self._register_tensor(value.tensor.detach(), path), attrs.asdict(value.tensor_slice)
            return {"slice": {"tensor": name, **{key: [*numbers] for key, numbers in part.items()}}}
        if isinstance(value, dict):
            # JSON would convert other keys to strings.
            if wrong := [key for key in value if type(key) is not str]:
                raise TypeError(f"{_join_path(path)} has the key {wrong[0]!r}; keys of a state are strings")
            return {"dict": {key: self.pack(part, (*path, key)) for key, part in value.items()}}
        if type(value) in (list, tuple):
            parts = [self.pack(part, (*path, index)) for index, part in enumerate(value)]
            return parts if type(value) is list else {"tuple": parts}
        if type(value) is float and not math.isfinite(value):
            return {"float": str(value)}
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError(f"{_join_path(path)} is a {type(value).__name__}, which can't be saved")

    def _register_tensor(self, tensor: Tensor, path: tuple[Any, ...]) -> str:
        """Add a tensor, and return its name; the same memory and layout as an earlier tensor's share its name."""
        name = _join_path(path)
        if (
            not path
            or not all(NAME_PART.fullmatch(str(part)) for part in path)
            or ".." in name
            or len(name) > MAX_NAME_LENGTH
        ):
            name = f"/{len(self.tensors)}"
        # All empty tensors, and all tensors on the meta device, have the null pointer, but are different tensors.
        memory = name if tensor.is_meta or not tensor.numel() else (tensor.device, tensor.data_ptr())
        key = memory, tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._names:
            self._names[key] = name
            self.tensors[name] = tensor
        return self._names[key]


def _parse_slice(content: Mapping[str, Any]) -> TensorSlice:
    """Return a leaf's slice. Raises ValueError if it is invalid."""
    shape, offsets, size = (content[key] for key in ("shape", "offsets", "size"))
    numbers = [*shape, *offsets, *size]
    if not len(shape) == len(offsets) == len(size) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a slice's shape, offsets or size is invalid")
    if any(at + length > whole for whole, at, length in zip(shape, offsets, size, strict=True)):
        raise ValueError("a slice is not inside its tensor")
    return TensorSlice(tuple(shape), tuple(offsets), tuple(size))


def _join_path(path: tuple[Any, ...]) -> str:
    """Join keys with slashes, for names and messages."""
    return "/".join(map(str, path)) or "it"


def _unpack_value(tree: Tree, tensors: Mapping[str, Tensor | SlicedTensor]) -> Any:
    """Return a tree's value."""
    if isinstance(tree, list):
        return [_unpack_value(part, tensors) for part in tree]
    if not isinstance(tree, dict):
        return tree
    [(kind, content)] = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "slice":
        saved, part = _parse_slice(content), tensors[content["tensor"]]
        if isinstance(part, Tensor):
            return SlicedTensor(part, saved)
        return SlicedTensor(part.tensor, TensorSlice.compose(saved, part.tensor_slice) or saved)
    if kind == "float":
        return float(content)
    if kind == "tuple":
        return tuple(_unpack_value(content, tensors))
    if kind != "dict":
        raise ValueError(f"the state has the unknown kind {kind!r}")
    return {key: _unpack_value(part, tensors) for key, part in content.items()}
