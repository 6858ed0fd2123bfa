"""Sharding specs: how a value of the whole step relates to the values of its microbatches."""

from typing import Any

import attrs


@attrs.frozen
class Shard:
    """Each microbatch has a slice of a tensor along `dim`, or some items of a list."""

    dim: int = 0


@attrs.frozen
class Stack:
    """The microbatches' tensors are stacked along a new dimension `dim`, or each has one item of a list."""

    dim: int = 0


@attrs.frozen
class Replicate:
    """Each microbatch has the same value."""


SpecTree = Any
"""A Shard, Stack or Replicate for a whole tree, or a tree of the same structure with one of these at each leaf."""
