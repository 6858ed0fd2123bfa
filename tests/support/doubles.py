"""Stand-ins for the device and the stages of a run."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import nn

from drawloom.components.ports.model import LayerRange
from drawloom.components.ports.stages import Stage


@attrs.frozen
class Machine:
    """A device with a peak of `used` bytes in use."""

    device: torch.device = torch.device("cpu")
    used: int = 0
    backend: str = "gloo"
    shares_gpu: bool = False

    def get_peak_memory_so_far(self) -> int:
        return self.used


@attrs.frozen
class FixedStages:
    """Stages with these modules, into which adapters may have been injected."""

    modules: Sequence[nn.Module]
    adapters: Sequence[Any] = ()

    @property
    def local(self) -> list[Stage]:
        span = LayerRange(0, 0, False, False)
        count, adapters = len(self.modules), self.adapters
        return [Stage(n, count, span, module, adapters=adapters) for n, module in enumerate(self.modules)]
