"""Stand-ins for the device and the stages of a run."""

from collections.abc import Sequence

import attrs
import torch
from torch import nn

from drawloom.components.ports.model import LayerRange, Stage


@attrs.frozen
class Machine:
    """A device, of which `used` bytes were in use at most."""

    device: torch.device = torch.device("cpu")
    used: int = 0
    backend: str = "gloo"

    def memory(self) -> int:
        return self.used


@attrs.frozen
class Held:
    """Stages of these modules."""

    modules: Sequence[nn.Module]

    @property
    def local(self) -> list[Stage]:
        span = LayerRange(0, 0, False, False)
        return [Stage(number, len(self.modules), span, module) for number, module in enumerate(self.modules)]
