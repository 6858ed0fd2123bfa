"""Stand-ins for the device and the stages of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from drawloom.components.ports.adapters import Adapter
from drawloom.components.ports.model import BatchContext, LayerRange
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


class PlainStages:
    """Stages whose layers compute with the optimizer's parameters, and that send nothing between them."""

    initial_folder: Path | None = None
    adapters: Sequence[Adapter] = ()

    def cast_weights(self, only_if_changed: bool = False) -> None:
        pass

    def move_gradients_to_masters(self) -> None:
        pass

    def infer_stage_inputs(self, stage: int, inputs: Any, shared: BatchContext) -> Any:
        raise AssertionError("nothing travels between stages")


@attrs.frozen
class FixedStages(PlainStages):
    """Stages with these modules, into which adapters may have been injected."""

    modules: Sequence[nn.Module]
    adapters: Sequence[Adapter] = ()

    @property
    def local(self) -> list[Stage]:
        span = LayerRange(0, 0, False, False)
        count, adapters = len(self.modules), self.adapters
        return [Stage(n, count, span, module, adapters=adapters) for n, module in enumerate(self.modules)]
