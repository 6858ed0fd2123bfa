"""Tensor slices: parts of whole tensors on one rank."""

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.components.ports.distributed import Group


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor, any shape, is a DTensor."""
    # Importing the class for isinstance would take a second.
    return hasattr(tensor, "placements")


def divide_into_shares(length: int, ranks: int) -> list[range]:
    """
    Divide `length` elements into consecutive ranges, one per rank.

    If `length` is not divisible by `ranks`, the first ranks get one more element than the last.
    """
    share, remainder = divmod(length, ranks)
    starts = [rank * share + min(rank, remainder) for rank in range(ranks + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def gather_shares(share: Tensor, ranks: Group, dim: int, length: int) -> Tensor:
    """
    Concatenate all ranks' shares along `dim`, which then has `length` elements; a collective.

    share: (..., n, ...), any dtype; the result is (..., length, ...).
    """
    sizes = [len(indices) for indices in divide_into_shares(length, ranks.size)]
    if missing := sizes[0] - sizes[ranks.rank]:  # a group gathers tensors of equal shape
        share = F.pad(share, (*(0, 0) * (share.ndim - 1 - dim), 0, missing))
    parts = zip(ranks.gather(share), sizes, strict=True)
    return torch.cat([part.narrow(dim, 0, size) for part, size in parts], dim)


@attrs.frozen
class TensorSlice:
    """A box in a tensor with shape `shape`, with its origin at `offsets` and the shape `size`."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "TensorSlice":
        """Return the slice that covers a complete tensor."""
        return cls(shape, (0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Element count."""
        return prod(self.size)

    def index(self, within: "TensorSlice | None" = None) -> tuple[slice, ...]:
        """Return the index that selects this slice from the whole tensor, or from the slice `within` containing it."""
        base = within.offsets if within else (0,) * len(self.shape)
        return tuple(
            slice(offset - start, offset - start + size)
            for offset, start, size in zip(self.offsets, base, self.size, strict=True)
        )

    def overlap(self, other: "TensorSlice") -> "TensorSlice | None":
        """Return the intersection with another slice of the same tensor; None if it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = (
            min(offset + size, other_offset + other_size)
            for offset, size, other_offset, other_size in zip(
                self.offsets, self.size, other.offsets, other.size, strict=True
            )
        )
        size = tuple(end - start for end, start in zip(ends, starts, strict=True))
        return TensorSlice(self.shape, starts, size) if all(length > 0 for length in size) else None

    @staticmethod
    def compose(outer: "TensorSlice | None", inner: "TensorSlice | None") -> "TensorSlice | None":
        """
        Return `inner`, a slice inside the slice `outer`, as a slice of the whole tensor; None means a complete tensor.
        """
        if outer is None or inner is None:
            return outer or inner
        offsets = tuple(start + offset for start, offset in zip(outer.offsets, inner.offsets, strict=True))
        return TensorSlice(outer.shape, offsets, inner.size)


@attrs.frozen(eq=False)
class RankSlice:
    """This rank's slice of a parameter in computation; the group's other ranks have the rest."""

    tensor_slice: TensorSlice
    ranks: Group

    @property
    def dim(self) -> int:
        """The split dimension; the first if there is only one rank."""
        sizes = zip(self.tensor_slice.size, self.tensor_slice.shape, strict=True)
        return next((dim for dim, (part, length) in enumerate(sizes) if part < length), 0)


@attrs.frozen(eq=False)
class ModelParameter:
    """
    Model parameter, which may be split over ranks.

    `tensor` is this rank's tensor: a DTensor if FSDP shards it, and only the slice `split` if tensor parallelism splits
    the parameter. Persistent buffers, which are whole on each rank, are written like parameters.
    """

    tensor: Tensor
    split: RankSlice | None = None
    is_buffer: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole parameter's shape."""
        return self.split.tensor_slice.shape if self.split else tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def is_divided_among_ranks(self) -> bool:
        """Whether the parameter is divided among ranks."""
        return self.split is not None or is_dtensor(self.tensor)

    def gather_whole(self) -> Tensor:
        """Gather the whole parameter, any shape; a collective over the ranks with its slices."""
        tensor: Any = self.tensor.detach()
        local: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
        if self.split is None:
            return local
        return gather_shares(local, self.split.ranks, self.split.dim, self.shape[self.split.dim])


@attrs.frozen(eq=False, kw_only=True)
class QuantizedParameter(ModelParameter):
    """
    Frozen model parameter in a quantized format: `tensor` is its storage, of another shape than `weight_shape`.

    `read` returns its values before they were quantized, from where they came.
    """

    weight_shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight_shape

    @property
    def is_divided_among_ranks(self) -> bool:
        """Whether other ranks are needed for the values: never."""
        return False

    def gather_whole(self) -> Tensor:
        """Return the whole parameter as it was before it was quantized, any shape."""
        return self.read()


class SlicedTensor:
    """Slice of a tensor in a state: `tensor` has the shape `tensor_slice.size`."""

    # Not an attrs class: walks over a tree of state descend into attrs classes.
    __slots__ = ("tensor", "tensor_slice")

    def __init__(self, tensor: Tensor, tensor_slice: TensorSlice) -> None:
        self.tensor = tensor
        self.tensor_slice = tensor_slice
