"""Slices of tensors: which part of a whole tensor one rank holds."""

from math import prod

import attrs
from torch import Tensor


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


def nested(outer: TensorSlice | None, inner: TensorSlice | None) -> TensorSlice | None:
    """The slice `inner` of the slice `outer` of a tensor, as a slice of the tensor; None is all of one."""
    if outer is None or inner is None:
        return outer or inner
    offsets = tuple(first + second for first, second in zip(outer.offsets, inner.offsets, strict=True))
    return TensorSlice(outer.shape, offsets, inner.size)


class SlicedTensor:
    """A slice of a tensor, in a state: `tensor` has the shape `place.size`."""

    # Not an attrs class: trees of states are descended into these.
    __slots__ = ("place", "tensor")

    def __init__(self, tensor: Tensor, place: TensorSlice) -> None:
        self.tensor = tensor
        self.place = place
