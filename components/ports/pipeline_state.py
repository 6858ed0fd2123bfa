"""What a step knows, seen whole or by microbatch, and how the one view becomes the other."""

from typing import Any, Protocol

import attrs


@attrs.frozen
class Shard:
    """Each microbatch has a part of one dimension of a tensor, or some items of a list."""

    dim: int = 0


@attrs.frozen
class Stack:
    """Each microbatch has one index of a dimension that its own tensor lacks, or one item of a list."""

    dim: int = 0


@attrs.frozen
class Replicate:
    """Each microbatch has all of it."""


SpecTree = Any
"""One of the three, which holds for a whole tree; or a tree of the same form, with one of the three at each leaf."""


class PipelineState(Protocol):
    """
    What a step knows by name, whole or for one microbatch.

    What is written in one view can be read in all; a name is in a view if it can be read there. What does not fit
    raises a ValueError, and what is not there a KeyError, with the name.
    """

    def __getitem__(self, key: str) -> Any: ...

    def __setitem__(self, key: str, value: Any) -> None: ...

    def __contains__(self, key: str) -> bool: ...
