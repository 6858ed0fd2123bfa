"""Port for the choice among keeping, recomputing and offloading."""

from typing import Literal, Protocol

import attrs

from drawloom.components.ports.stages import Recompute
from drawloom.graph import port

StateLocation = Literal["device", "host"]
"""Memory for an optimizer's state: the device's, or pinned memory of the host."""


@attrs.frozen
class MemoryChoice:
    """
    Use of a run's memory: recompute policies by stage (activation checkpointing), the stages whose activations wait in
    host memory, and the memory for the optimizer's state.
    """

    recompute: tuple[Recompute, ...]
    offloaded: frozenset[int]
    states: StateLocation

    @classmethod
    def keep_all(cls, stages: int, states: StateLocation) -> "MemoryChoice":
        """Return the choice to keep all activations of this many stages on the device."""
        nothing: Recompute = "none"
        return cls((nothing,) * stages, frozenset(), states)


@port
class MemoryPolicy(Protocol):
    """Choice of what a run keeps on the device, in place of the settings of stages and optimizer."""

    def choose(self) -> MemoryChoice:
        """
        Return the choice for this run, before stages allocate. Ranks may choose differently: results do not change.

        Raises UserError if the run can't be planned.
        """
        ...
