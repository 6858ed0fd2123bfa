"""How much memory the run needs."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from drawloom.components.ports.distributed import Device
from drawloom.components.ports.run import Accumulator, Step, Value
from drawloom.graph import component


@component(impact="safe")
class Memory:
    """`memory`: the most bytes in use so far on any rank."""

    device: Device
    accumulators: ClassVar[Mapping[str, Accumulator]] = {"bytes": Accumulator("max")}

    def update(self, step: Step) -> Mapping[str, Tensor]:
        """What this rank's device has had in use."""
        return {"bytes": torch.tensor(self.device.memory(), dtype=torch.float64)}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """The greatest of the ranks."""
        return {"memory": int(totals["bytes"])}
