"""Peak memory, in total and by kind."""

from collections.abc import Mapping

import torch

from drawloom import Every, component, setting
from drawloom.ports import (
    MEMORY_KINDS,
    Accumulator,
    Device,
    MemoryUser,
    MetricTotals,
    MetricValues,
    Step,
    Value,
    sum_memory_by_kind,
)


@component(impact="safe")
class Memory:
    """
    `memory`: the peak bytes in use so far, the maximum over ranks.

    With `by_kind` also `memory/<kind>`, such as `memory/optimizer_state`, the kind's maximum over ranks.
    `memory/workspace` is the rest of the peak: activations and temporary tensors, and on a CPU the process itself.
    """

    device: Device
    users: Every[MemoryUser]
    by_kind: bool = setting("report memory by kind, too", default=False)

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """The peak, and bytes by kind in MEMORY_KINDS order."""
        kinds = {"kinds": Accumulator("max", (len(MEMORY_KINDS),))} if self.by_kind else {}
        return {"bytes": Accumulator("max"), **kinds}

    def measure_on_rank(self, step: Step) -> MetricTotals:
        """Return this rank's peak device bytes, 0-dimensional, and bytes by kind (kinds,), both float64."""
        peak = self.device.get_peak_memory_so_far()
        measured = {"bytes": torch.tensor(peak, dtype=torch.float64)}
        if self.by_kind:
            sizes = sum_memory_by_kind(self.users.values(), peak)
            measured["kinds"] = torch.tensor([sizes.get(kind, 0) for kind in MEMORY_KINDS], dtype=torch.float64)
        return measured

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return the maxima over ranks: `bytes` is 0-dimensional, `kinds` (kinds,)."""
        values: dict[str, Value] = {"memory": int(totals["bytes"])}
        if self.by_kind:
            values |= {f"memory/{kind}": int(totals["kinds"][index]) for index, kind in enumerate(MEMORY_KINDS)}
        return values
