"""Collectives on the meta device: an operator that records a run's messages, for planning."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "wait"]
"""A wait is the host's, for a result from the device, and sends nothing."""

# An operator, so that it is seen among those that a module runs.
torch.library.define("drawloom::collective", "(Tensor x, int[] shape, str kind, str dimension, int ranks) -> Tensor")


COLLECTIVE = torch.ops.drawloom.collective


@torch.library.register_fake("drawloom::collective")  # type: ignore[untyped-decorator]
def _fake_collective(x: Tensor, shape: Sequence[int], *_: Any) -> Tensor:
    """Return an empty meta tensor with `shape`, for x (any shape)."""
    return x.new_empty(shape)


def emulate_collective(x: Tensor, shape: Sequence[int], kind: Kind, dimension: str, ranks: int) -> Tensor:
    """Return a meta tensor with `shape`, the result of a collective along a mesh dimension on x (any shape)."""
    result: Tensor = torch.ops.drawloom.collective(x, list(shape), kind, dimension, ranks)
    return result


def count_message_bytes(x: Tensor, result: Tensor, kind: str, ranks: int) -> float:
    """
    Return the bytes sent per rank in a ring collective, or directly in an all-to-all, from x (any shape) to result.

    Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH", sections 4.1 to 4.4.
    """
    whole = max(x.nbytes, result.nbytes)
    return whole * (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks
