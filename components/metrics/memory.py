"""How much memory the run needs."""

from collections.abc import Mapping

import torch
from torch import Tensor

from drawloom.components.ports.distributed import Device
from drawloom.components.ports.memory import MEMORY_KINDS, MemoryUser, memory_by_kind
from drawloom.components.ports.run import Accumulator, Step, Value
from drawloom.graph import Every, component, setting


@component(impact="safe")
class Memory:
    """
    `memory`: the most bytes in use so far on any rank.

    With `by_kind` also `memory/<kind>`, such as `memory/optimizer_state`, of the rank that has most of the kind.
    `memory/workspace` is what the peak has besides the others: activations and temporary tensors, and on a CPU the
    process itself.
    """

    device: Device
    users: Every[MemoryUser]
    by_kind: bool = setting(default=False, doc="whether to write down memory by kind, too")

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """The peak, and bytes by kind in the order of MEMORY_KINDS."""
        kinds = {"kinds": Accumulator("max", (len(MEMORY_KINDS),))} if self.by_kind else {}
        return {"bytes": Accumulator("max"), **kinds}

    def update(self, step: Step) -> Mapping[str, Tensor]:
        """The most bytes that this rank's device has had in use, 0-dimensional, and by kind (kinds,), both float64."""
        peak = self.device.memory()
        given = {"bytes": torch.tensor(peak, dtype=torch.float64)}
        if self.by_kind:
            held = memory_by_kind(self.users.values(), peak)
            given["kinds"] = torch.tensor([held.get(kind, 0) for kind in MEMORY_KINDS], dtype=torch.float64)
        return given

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """The greatest of the ranks: `bytes` 0-dimensional, `kinds` (kinds,)."""
        values: dict[str, Value] = {"memory": int(totals["bytes"])}
        if self.by_kind:
            values |= {f"memory/{kind}": int(totals["kinds"][place]) for place, kind in enumerate(MEMORY_KINDS)}
        return values
