"""Sharding specs: how a step's value corresponds to its microbatches' values."""

from typing import Any

import attrs


@attrs.frozen
class Shard:
    """Spec for a value cut into microbatches: a tensor into slices along `dim`, a list into sublists."""

    dim: int = 0


@attrs.frozen
class Stack:
    """Spec for a value with one entry per microbatch: a tensor stacked along dimension `dim`, or a list."""

    dim: int = 0


@attrs.frozen
class Replicate:
    """Spec for a value with the same content in all microbatches."""


SpecTree = Any
"""Shard, Stack or Replicate for a whole tree, or a tree of the same structure whose leaves are specs."""
