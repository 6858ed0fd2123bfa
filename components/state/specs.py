"""Sharding specs: relation of a value of the whole step to the values of its microbatches."""

from typing import Any

import attrs


@attrs.frozen
class Shard:
    """Spec of values whose microbatches have slices of a tensor along `dim`, or some items of a list."""

    dim: int = 0


@attrs.frozen
class Stack:
    """Spec of values that stack the microbatches' tensors along a new dimension `dim`, or list their items."""

    dim: int = 0


@attrs.frozen
class Replicate:
    """Spec of values that are the same in all microbatches."""


SpecTree = Any
"""Shard, Stack or Replicate for a whole tree, or a tree of the same structure whose leaves are specs."""
