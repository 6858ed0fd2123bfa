"""
State as files hold it: tensors by name, and a tree of JSON that says where each belongs.

In the tree a dict is {"dict": {...}}, a tensor {"tensor": its name} and a float that JSON has no word for
{"float": "nan"}; all other values stand for themselves. A tensor's name is its path, joined by slashes and escaped as
in a JSON pointer (RFC 6901), so that no two paths have one name.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

Tree = Any
"""What JSON can hold."""


def pack(states: Mapping[str, Any]) -> tuple[Tree, dict[str, Tensor]]:
    """
    A tree, and the tensors that it names: dense, on the CPU, no two of them in one piece of memory.

    Raises TypeError, with the path, for what a state can't hold.
    """
    packer = _Packer()
    return packer.pack(dict(states), ()), packer.tensors


def unpack(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """
    What was packed.

    Raises ValueError if tree and tensors don't belong together; both what is missing and what is too much is listed.
    """
    wanted = set(_named(tree))
    missing, extra = wanted - tensors.keys(), tensors.keys() - wanted
    if missing or extra:
        lists = [("missing", missing), ("unexpected", extra)]
        raise ValueError("; ".join(f"{what} {', '.join(sorted(which))}" for what, which in lists if which))
    return _unpack(tree, tensors)


class _Packer:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._memory: set[int] = set()

    def pack(self, value: Any, path: tuple[str, ...]) -> Tree:
        if isinstance(value, Tensor):
            name = _join(path)
            self.tensors[name] = self._apart(value)
            return {"tensor": name}
        if isinstance(value, Mapping):
            return {"dict": {_key(key, path): self.pack(part, (*path, key)) for key, part in value.items()}}
        if type(value) is list:
            return [self.pack(part, (*path, str(place))) for place, part in enumerate(value)]
        if type(value) is float and not math.isfinite(value):
            return {"float": str(value)}
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError(f"{_join(path)} is a {type(value).__name__}, which a checkpoint can't hold")

    def _apart(self, tensor: Tensor) -> Tensor:
        """The tensor in memory that it fills and shares with no other."""
        dense = tensor.detach().to("cpu").contiguous()
        storage = dense.untyped_storage()
        if storage.nbytes() != dense.nbytes or storage.data_ptr() in self._memory:
            dense = dense.clone()
        self._memory.add(dense.untyped_storage().data_ptr())
        return dense


def _key(key: Any, path: Iterable[str]) -> str:
    if type(key) is not str:
        raise TypeError(f"{_join(path)} has the key {key!r}; keys of a state are strings")
    return key


def _join(path: Iterable[str]) -> str:
    return "/".join(part.replace("~", "~0").replace("/", "~1") for part in path)


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
