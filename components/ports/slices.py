"""Slices of tensors: which part of a whole tensor one rank holds."""

from itertools import pairwise
from math import prod
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.components.ports.distributed import Group


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor of any shape is a DTensor."""
    # Without importing the class, which takes a second.
    return hasattr(tensor, "placements")


def rank_shares(length: int, ranks: int) -> list[range]:
    """
    Which of `length` elements each of several ranks has: consecutive ones.

    Where they do not divide, the first ranks have one more than the last.
    """
    each, more = divmod(length, ranks)
    starts = [rank * each + min(rank, more) for rank in range(ranks + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def gather_shares(share: Tensor, ranks: Group, dim: int, length: int) -> Tensor:
    """
    The whole dimension `dim` of `length` elements, of which each rank of a group has its share; a collective.

    share: (..., n, ...), of any dtype; the result is (..., length, ...).
    """
    sizes = [len(each) for each in rank_shares(length, ranks.size)]
    if missing := sizes[0] - sizes[ranks.rank]:  # a group gathers tensors of one shape
        share = F.pad(share, (*(0, 0) * (share.ndim - 1 - dim), 0, missing))
    parts = zip(ranks.gather(share), sizes, strict=True)
    return torch.cat([part.narrow(dim, 0, size) for part, size in parts], dim)


@attrs.frozen
class TensorSlice:
    """A box in a tensor of shape `shape`: it begins at `offsets` and has the shape `size`."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "TensorSlice":
        """All of a tensor."""
        return cls(shape, (0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.size)

    def index(self, within: "TensorSlice | None" = None) -> tuple[slice, ...]:
        """The index of the slice in the whole tensor, or in the tensor of another slice that contains it."""
        base = within.offsets if within else (0,) * len(self.shape)
        return tuple(
            slice(at - start, at - start + size) for at, start, size in zip(self.offsets, base, self.size, strict=True)
        )

    def overlap(self, other: "TensorSlice") -> "TensorSlice | None":
        """What two slices of one tensor have in common; None if that is nothing."""
        low = tuple(max(mine, theirs) for mine, theirs in zip(self.offsets, other.offsets, strict=True))
        ends = (
            min(a + size, b + length)
            for a, size, b, length in zip(self.offsets, self.size, other.offsets, other.size, strict=True)
        )
        size = tuple(end - start for end, start in zip(ends, low, strict=True))
        return TensorSlice(self.shape, low, size) if all(length > 0 for length in size) else None

    @staticmethod
    def nested(outer: "TensorSlice | None", inner: "TensorSlice | None") -> "TensorSlice | None":
        """The slice `inner` of the slice `outer` of a tensor, as a slice of the tensor; None is all of one."""
        if outer is None or inner is None:
            return outer or inner
        offsets = tuple(first + second for first, second in zip(outer.offsets, inner.offsets, strict=True))
        return TensorSlice(outer.shape, offsets, inner.size)


@attrs.frozen(eq=False)
class RankSlice:
    """The slice of a parameter that this rank computes with, where the ranks of a group have the others."""

    place: TensorSlice
    ranks: Group

    @property
    def dim(self) -> int:
        """The dimension that is split; the first if there is one rank."""
        sizes = zip(self.place.size, self.place.shape, strict=True)
        return next((dim for dim, (part, length) in enumerate(sizes) if part < length), 0)


@attrs.frozen(eq=False)
class ModelParameter:
    """
    A parameter of the model, of which ranks may have slices.

    `tensor` is this rank's: a DTensor where FSDP shards it, and of its slice where it is `split`, too. Persistent
    buffers, which are whole on each rank, are written like parameters.
    """

    tensor: Tensor
    split: RankSlice | None = None
    is_buffer: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the whole parameter."""
        return self.split.place.shape if self.split else tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """That of all slices."""
        return self.tensor.dtype

    @property
    def is_shared(self) -> bool:
        """Whether other ranks have other slices."""
        return self.split is not None or is_dtensor(self.tensor)

    def whole(self) -> Tensor:
        """The whole parameter, of any shape; a collective of the ranks that have slices of it."""
        tensor: Any = self.tensor.detach()
        mine: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
        if self.split is None:
            return mine
        return gather_shares(mine, self.split.ranks, self.split.dim, self.shape[self.split.dim])


class SlicedTensor:
    """A slice of a tensor, in a state: `tensor` has the shape `place.size`."""

    # Not an attrs class: trees of states are descended into these.
    __slots__ = ("place", "tensor")

    def __init__(self, tensor: Tensor, place: TensorSlice) -> None:
        self.tensor = tensor
        self.place = place
