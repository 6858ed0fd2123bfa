"""Mappings of the tensors of one state to those of another, as plain data that names inputs and outputs."""

from collections.abc import Callable, Sequence

import attrs
from torch import Tensor

Convert = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""A group's input tensors (any shapes, in the order of `inputs`) to its outputs; it changes none in place."""


@attrs.frozen
class TensorGroup:
    """A conversion of some tensors to others; `revert` is its inverse, None if there is none."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    convert: Convert
    revert: Convert | None = None

    def __attrs_post_init__(self) -> None:
        for what, names in (("inputs", self.inputs), ("outputs", self.outputs)):
            if not names or len(set(names)) < len(names):
                raise ValueError(f"a group's {what} are {names}; write at least one name, and each once")

    def inverse(self) -> "TensorGroup":
        """The group that converts the outputs, of any shape, back to the inputs. Raises ValueError if there is none."""
        if self.revert is None:
            raise ValueError(f"the conversion of {', '.join(self.inputs)} to {', '.join(self.outputs)} has no inverse")
        return TensorGroup(self.outputs, self.inputs, self.revert, self.convert)


@attrs.frozen
class Mapper:
    """
    Independent groups: no two share an input or an output.

    Their order is the same in every process: a group may contain collectives, which all ranks must run in one order.
    """

    groups: tuple[TensorGroup, ...]

    @property
    def inputs(self) -> list[str]:
        """The names of all inputs, group by group."""
        return [name for group in self.groups for name in group.inputs]

    @property
    def outputs(self) -> list[str]:
        """The names of all outputs, group by group."""
        return [name for group in self.groups for name in group.outputs]

    def inverse(self) -> "Mapper":
        """The inverse of every group. Raises ValueError if a group has none."""
        return Mapper(tuple(group.inverse() for group in self.groups))
