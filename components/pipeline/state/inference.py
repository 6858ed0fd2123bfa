"""Which specification a value has if nobody gave one: what people mean most often, leaf by leaf."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from drawloom.components.ports.pipeline_state import Replicate, Shard, SpecTree, Stack
from drawloom.components.storage.pytree import branches, rebuild


def spec_of_whole(value: Any) -> SpecTree:
    """
    For a value of the whole batch: tensors and lists are cut along dimension 0.

    Tensors without dimensions and all else are the same for every microbatch.
    """
    return _by_leaf(lambda leaf: Shard() if isinstance(leaf, Tensor) and leaf.ndim else Replicate(), value)


def spec_of_shard(value: Any) -> SpecTree:
    """
    For a value of one microbatch: tensors and lists are joined along dimension 0.

    Tensors without dimensions are stacked, and all else is gathered in a list.
    """
    return _by_leaf(lambda leaf: Shard() if isinstance(leaf, Tensor) and leaf.ndim else Stack(), value)


def _by_leaf(choose: Callable[[Any], SpecTree], value: Any) -> SpecTree:
    if isinstance(value, list):
        return Shard()
    found = branches(value)
    return choose(value) if found is None else rebuild(value, [_by_leaf(choose, child) for _, child in found])
