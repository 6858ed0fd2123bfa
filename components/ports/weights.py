"""Mappings between two states' tensors, as plain data with input and output names."""

from collections.abc import Callable, Sequence

import attrs
from torch import Tensor

MAX_SHARD = 4 * 2**30  # bytes; files beyond 4 GiB are awkward to download and fail on some file systems

STATE, ADAPTER_CONFIG = "trainer_state.json", "adapter_config.json"
"""Files with the step of exported weights, as in Hugging Face's Trainer, and with the settings of PEFT's adapters."""

Convert = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""
A function of a group's input tensors (any shapes, in the order of `inputs`) to its outputs; it changes none in place.
"""


@attrs.frozen
class TensorGroup:
    """Conversion from tensors to tensors; `revert` is its inverse, None if the conversion is not invertible."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    convert: Convert
    revert: Convert | None = None

    def __attrs_post_init__(self) -> None:
        for field, names in (("inputs", self.inputs), ("outputs", self.outputs)):
            if not names or len(set(names)) < len(names):
                raise ValueError(f"a group's {field} are {names}; write at least one name, and each once")

    def inverse(self) -> "TensorGroup":
        """Return the group that converts the outputs back to the inputs. Raises ValueError if there is no inverse."""
        if self.revert is None:
            raise ValueError(f"the conversion of {', '.join(self.inputs)} to {', '.join(self.outputs)} has no inverse")
        return TensorGroup(self.outputs, self.inputs, self.revert, self.convert)


@attrs.frozen
class Mapper:
    """
    Independent tensor conversions: no two groups share an input or an output.

    Groups have the same order in every process: a group may contain collectives, which all ranks must run in one order.
    `ignored` are patterns (fnmatch) of tensors in files that are not read.
    """

    groups: tuple[TensorGroup, ...]
    ignored: tuple[str, ...] = ()

    @property
    def inputs(self) -> list[str]:
        """All input names, group by group."""
        return [name for group in self.groups for name in group.inputs]

    @property
    def outputs(self) -> list[str]:
        """All output names, group by group."""
        return [name for group in self.groups for name in group.outputs]

    def inverse(self) -> "Mapper":
        """Return the mapper with the inverse groups. Raises ValueError if a group has no inverse."""
        return Mapper(tuple(group.inverse() for group in self.groups), self.ignored)
