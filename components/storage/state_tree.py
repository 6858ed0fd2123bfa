"""
State as files hold it: tensors by name, and a tree of JSON that says where each belongs.

In the tree a dict is {"dict": {...}}, a tensor {"tensor": its name} and a float that JSON has no word for
{"float": "nan"}; all other values stand for themselves. A tensor's name is its path joined by slashes, or a slash and a
number where the path holds what files have no name for.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

Tree = Any
"""What JSON can hold."""

PART = re.compile(r"[A-Za-z0-9_.\-]+")
LONGEST = 256  # characters of a name


def pack(states: Mapping[str, Any]) -> tuple[Tree, dict[str, Tensor]]:
    """
    A tree, and the tensors that it names: not copies, and each once, however often it stands in the states.

    Raises TypeError, with the path, for what a state can't hold.
    """
    packer = _Packer()
    return packer.pack(dict(states), ()), packer.tensors


def unpack(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """
    What was packed.

    Raises ValueError if tree and tensors don't belong together; both what is missing and what is too much is listed.
    """
    wanted = named(tree)
    missing, extra = wanted - tensors.keys(), tensors.keys() - wanted
    if missing or extra:
        lists = [("missing", missing), ("unexpected", extra)]
        raise ValueError("; ".join(f"{what} {', '.join(sorted(which))}" for what, which in lists if which))
    return _unpack(tree, tensors)


def named(tree: Tree) -> set[str]:
    """The names of all tensors of a tree."""
    return set(_named(tree))


def entries(tree: Tree) -> dict[str, Tree]:
    """The entries of a tree that is a dict; ValueError if it is none."""
    content = tree.get("dict") if isinstance(tree, dict) else None
    if not isinstance(content, dict):
        raise ValueError("a state is no dict")
    return content


class _Packer:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[Any, str] = {}

    def pack(self, value: Any, path: tuple[str, ...]) -> Tree:
        if isinstance(value, Tensor):
            return {"tensor": self._name(value.detach(), path)}
        if isinstance(value, Mapping):
            return {"dict": {_key(key, path): self.pack(part, (*path, key)) for key, part in value.items()}}
        if type(value) is list:
            return [self.pack(part, (*path, str(place))) for place, part in enumerate(value)]
        if type(value) is float and not math.isfinite(value):
            return {"float": str(value)}
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError(f"{'/'.join(path)} is a {type(value).__name__}, which a checkpoint can't hold")

    def _name(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        """The name of a tensor, an older one if the same numbers have one already."""
        name = "/".join(path)
        if not all(map(PART.fullmatch, path)) or ".." in name or len(name) > LONGEST:
            name = f"/{len(self.tensors)}"
        where = name if not tensor.numel() else (tensor.device, tensor.data_ptr())
        same = where, tensor.shape, tensor.stride(), tensor.dtype
        if same not in self._names:
            self._names[same] = name
            self.tensors[name] = tensor
        return self._names[same]


def _key(key: Any, path: Iterable[str]) -> str:
    if type(key) is not str:
        raise TypeError(f"{'/'.join(path)} has the key {key!r}; keys of a state are strings")
    return key


def _named(tree: Tree) -> Iterable[str]:
    if isinstance(tree, list):
        for part in tree:
            yield from _named(part)
    elif isinstance(tree, dict) and "dict" in tree:
        for part in tree["dict"].values():
            yield from _named(part)
    elif isinstance(tree, dict) and "tensor" in tree:
        yield tree["tensor"]


def _unpack(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_unpack(part, tensors) for part in tree]
    if not isinstance(tree, dict):
        return tree
    [(kind, content)] = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind != "dict":
        raise ValueError(f"{kind!r} is no kind of value")
    return {key: _unpack(part, tensors) for key, part in content.items()}
