"""Port for the choice among keeping, recomputing, offloading and quantizing."""

from typing import Protocol

import attrs

from drawloom.components.ports.stages import Recompute
from drawloom.graph import port


@attrs.frozen
class MemoryChoice:
    """
    A run's memory use: recompute policies by stage (activation checkpointing), the stages whose activations wait in
    host memory, and by pipeline rank the fraction of the optimizer's state in host memory, from 0 to 1.
    """

    recompute: tuple[Recompute, ...]
    offloaded: frozenset[int]
    host_states: tuple[float, ...]

    @classmethod
    def keep_all(cls, stages: int, ranks: int) -> "MemoryChoice":
        """Return the choice to keep everything on the device, for these numbers of stages and pipeline ranks."""
        nothing: Recompute = "none"
        return cls((nothing,) * stages, frozenset(), (0.0,) * ranks)


@port
class MemoryPolicy(Protocol):
    """Chooses what a run keeps on the device, in place of settings."""

    def choose(self) -> MemoryChoice:
        """
        Return the choice for this run, before stages allocate. Ranks may choose differently: results do not change,
        unless the recompute policy is "quantized".

        Raises UserError if the run can't be planned.
        """
        ...
