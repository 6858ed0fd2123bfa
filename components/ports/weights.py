"""How the tensors of one state become those of another: plain data, which names what goes in and what comes out."""

from collections.abc import Callable, Sequence

import attrs
from torch import Tensor

Convert = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Tensors in the order of a group's inputs to tensors in the order of its outputs; it changes none of them in place."""


@attrs.frozen
class TensorGroup:
    """Tensors that become others together, without any that is not among them. `revert` leads back, if a way does."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    convert: Convert
    revert: Convert | None = None

    def __attrs_post_init__(self) -> None:
        for what, names in (("inputs", self.inputs), ("outputs", self.outputs)):
            if not names or len(set(names)) < len(names):
                raise ValueError(f"a group's {what} are {names}; it needs at least one, and each once")

    def inverse(self) -> "TensorGroup":
        """The way back; ValueError if there is none."""
        if self.revert is None:
            raise ValueError(f"no way leads back from {', '.join(self.outputs)} to {', '.join(self.inputs)}")
        return TensorGroup(self.outputs, self.inputs, self.revert, self.convert)


@attrs.frozen
class Mapper:
    """
    Groups that are independent of one another: no two share a name on either side.

    Their order is that in which they were written, the same in every process: groups may hold collectives, and then
    all ranks must come to them in one order.
    """

    groups: tuple[TensorGroup, ...]

    @property
    def inputs(self) -> list[str]:
        """All names that go in, group by group."""
        return [name for group in self.groups for name in group.inputs]

    @property
    def outputs(self) -> list[str]:
        """All names that come out, group by group."""
        return [name for group in self.groups for name in group.outputs]

    def inverse(self) -> "Mapper":
        """The way back; ValueError if a group has none."""
        return Mapper(tuple(group.inverse() for group in self.groups))
