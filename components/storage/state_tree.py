"""
The file format of state dicts: a JSON tree, and tensors by name.

In the tree a dict is {"dict": {...}}, a tuple {"tuple": [...]}, a tensor {"tensor": its name}, a slice of a tensor
{"slice": {"tensor": its name, "shape": of the whole, "offsets": ..., "size": ...}}, and a float that JSON can't hold
{"float": "nan"}; all other values are unchanged. A tensor's name is its path joined by slashes, or a slash
and a number if the path has characters that are not allowed in names of tensors.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import attrs
from torch import Tensor

from drawloom.components.ports.slices import SlicedTensor, TensorSlice

Tree = Any
"""A JSON value."""

PART = re.compile(r"[A-Za-z0-9_.\-]+")
LONGEST = 256  # characters of a name


class Packed(NamedTuple):
    """A tree, and the tensors that it names."""

    tree: Tree
    tensors: dict[str, Tensor]


def pack(state: Any) -> Packed:
    """
    The tree of a state, and its tensors, which are not copied; a tensor that occurs twice is stored once.

    Raises TypeError, with the path, for a value that `unpack` would not restore exactly.
    """
    packer = _Packer()
    return Packed(packer.pack(state, ()), packer.tensors)


def unpack(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """
    The state of a tree and its tensors, of any shape, which are not copied.

    Raises ValueError, with all missing and unexpected names, if the tensors are not those that the tree names.
    """
    wanted = named(tree)
    missing, extra = wanted - tensors.keys(), tensors.keys() - wanted
    if missing or extra:
        lists = [("missing", missing), ("unexpected", extra)]
        raise ValueError("; ".join(f"{what} {', '.join(sorted(which))}" for what, which in lists if which))
    return _unpack(tree, tensors)


def named(tree: Tree) -> set[str]:
    """The names of all tensors of a tree."""
    return {name for name, _ in leaves(tree)}


def leaves(tree: Tree) -> Iterator[tuple[str, TensorSlice | None]]:
    """The names of the tensors in a tree, and of those that are slices their places."""
    if isinstance(tree, list):
        for part in tree:
            yield from leaves(part)
    elif isinstance(tree, dict):
        [(kind, content)] = tree.items()
        if kind == "tensor":
            yield content, None
        elif kind == "slice":
            yield content["tensor"], _place(content)
        else:
            yield from leaves([*content.values()] if kind == "dict" else content)


def narrowed(tree: Tree, parts: Mapping[str, TensorSlice]) -> Tree:
    """The tree of a state of which only these parts of the tensors are held: their leaves become slices."""
    if isinstance(tree, list):
        return [narrowed(part, parts) for part in tree]
    if not isinstance(tree, dict):
        return tree
    [(kind, content)] = tree.items()
    if kind == "tensor" and content in parts:
        return _slice(content, parts[content])
    if kind == "slice" and content["tensor"] in parts:
        name = content["tensor"]
        return _slice(name, TensorSlice.nested(_place(content), parts[name]) or parts[name])
    if kind == "dict":
        return {kind: {key: narrowed(part, parts) for key, part in content.items()}}
    return {kind: narrowed(content, parts)} if kind == "tuple" else tree


def entries(tree: Tree) -> dict[str, Tree]:
    """The entries of the tree of a dict; ValueError if it is the tree of something else."""
    content = tree.get("dict") if isinstance(tree, dict) else None
    if not isinstance(content, dict):
        raise ValueError("a state is not a dict")
    return content


class _Packer:
    """Collects tensors under names while it packs a state."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[Any, str] = {}

    def pack(self, value: Any, path: tuple[Any, ...]) -> Tree:
        if isinstance(value, Tensor):
            return {"tensor": self._name(value.detach(), path)}
        if isinstance(value, SlicedTensor):
            return _slice(self._name(value.tensor.detach(), path), value.place)
        if isinstance(value, dict):
            # JSON would turn other keys into strings.
            if wrong := [key for key in value if type(key) is not str]:
                raise TypeError(f"{_text(path)} has the key {wrong[0]!r}; keys of a state are strings")
            return {"dict": {key: self.pack(part, (*path, key)) for key, part in value.items()}}
        if type(value) in (list, tuple):
            parts = [self.pack(part, (*path, place)) for place, part in enumerate(value)]
            return parts if type(value) is list else {"tuple": parts}
        if type(value) is float and not math.isfinite(value):
            return {"float": str(value)}
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError(f"{_text(path)} is a {type(value).__name__}, which can't be saved")

    def _name(self, tensor: Tensor, path: tuple[Any, ...]) -> str:
        """The name of a tensor; the earlier one, if the same memory with the same layout has a name."""
        name = _text(path)
        if not path or not all(PART.fullmatch(str(part)) for part in path) or ".." in name or len(name) > LONGEST:
            name = f"/{len(self.tensors)}"
        # Empty tensors, and all on the meta device, share the null pointer without being the same tensor.
        memory = name if tensor.is_meta or not tensor.numel() else (tensor.device, tensor.data_ptr())
        key = memory, tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._names:
            self._names[key] = name
            self.tensors[name] = tensor
        return self._names[key]


def _slice(name: str, place: TensorSlice) -> Tree:
    """The leaf of a slice whose tensor has this name."""
    return {"slice": {"tensor": name, **{key: [*part] for key, part in attrs.asdict(place).items()}}}


def _place(content: Mapping[str, Any]) -> TensorSlice:
    """The slice of a tree's leaf; ValueError if it is not one."""
    shape, offsets, size = (content[key] for key in ("shape", "offsets", "size"))
    numbers = [*shape, *offsets, *size]
    if not len(shape) == len(offsets) == len(size) or any(type(each) is not int or each < 0 for each in numbers):
        raise ValueError("a slice has no valid shape")
    if any(at + length > whole for whole, at, length in zip(shape, offsets, size, strict=True)):
        raise ValueError("a slice is not inside its tensor")
    return TensorSlice(tuple(shape), tuple(offsets), tuple(size))


def _text(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path)) or "it"


def _unpack(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_unpack(part, tensors) for part in tree]
    if not isinstance(tree, dict):
        return tree
    [(kind, content)] = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "slice":
        return SlicedTensor(tensors[content["tensor"]], _place(content))
    if kind == "float":
        return float(content)
    if kind == "tuple":
        return tuple(_unpack(content, tensors))
    if kind != "dict":
        raise ValueError(f"{kind!r} is not a kind of value")
    return {key: _unpack(part, tensors) for key, part in content.items()}
