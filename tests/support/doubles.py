"""Stand-ins for the device, the stages and the processes of a run, for clocks and for exits."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.ports.model import BatchContext, LayerRange
from drawloom.components.ports.stages import Adapter, Stage, WeightCopies


@attrs.frozen
class Machine:
    """A device with a peak of `used` bytes in use."""

    device: torch.device = torch.device("cpu")
    used: int = 0
    backend: str = "gloo"
    shares_gpu: bool = False

    def make_current(self) -> None:
        pass

    def get_peak_memory_so_far(self) -> int:
        return self.used


class PlainStages:
    """Stages whose layers compute with the optimizer's parameters, and that send nothing between them."""

    initial_folder: Path | None = None
    adapters: Sequence[Adapter] = ()
    weight_copies: Sequence[WeightCopies] = ()

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


class SilentRank(SingleProcess):
    """A rank among several, which sends nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@attrs.frozen
class SecondRank:
    """A world group as rank 1 sees it."""

    rank: int = 1
    size: int = 2


@attrs.frozen
class OneJob:
    """A run with seed 3."""

    seed: int = 3
    name: str = "run"
    folder_path: Path = Path("runs/run")


@attrs.define
class FakeClock:
    """A clock set by a test."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@attrs.define
class Exit:
    """Replaces os._exit, and records the codes."""

    codes: list[int] = attrs.field(factory=list)
    called: threading.Event = attrs.field(factory=threading.Event)

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.called.set()
