"""An exponential moving average of the weights (Polyak and Juditsky 1992; Izmailov et al. 2018, arXiv 1803.05407)."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.ports.memory import MemoryKind
from drawloom.components.ports.run import Step
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.stages import Parameters
from drawloom.graph import between, component, setting


@component(reads=("weights", "skip?"))
class WeightAverage:
    """
    Keeps an average of the trained weights: `decay` times itself and 1 - `decay` times the weights, after each step.

    It begins with the weights after the first step that it sees; a skipped step changes nothing. An average is of its
    parameter's slice, in float32 at least. Nodes with `average = "@ema"` use it in place of the weights: [evaluate],
    [export], [sample].
    """

    parameters: Parameters
    decay: float = setting(default=0.999, check=between(0, 1), doc="share of the average that a step keeps")

    _averages: dict[str, Tensor] = attrs.field(init=False, factory=dict)

    @torch.no_grad()
    def run_phase(self, step: Step) -> None:
        """Move the average, unless the step is skipped."""
        if not self._averages:
            self._averages = {name: _widened(part.detach().clone()) for name, part in self.parameters.named()}
        else:
            step.apply_update(self._move)

    def _move(self, skip: Tensor | None) -> None:
        """Move the average; a flag `skip`, float32 () on the device, of 1 changes nothing."""
        for name, parameter in self.parameters.named():
            average = self._averages[name]
            share: Any = 1 - self.decay
            if skip is not None:
                share = (share * (1 - skip.double())).to(average.dtype)
            average.lerp_(parameter.to(average.dtype), share)

    def averages(self) -> Mapping[str, Tensor]:
        """The averages (any shape, at least float32) of this rank's slices by parameter; none before the first step."""
        return self._averages

    def swapped(self) -> AbstractContextManager[None]:
        """Have the averages in place of the weights; afterwards the weights are what they were."""
        return self._swapped()

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        weights = [(part, self._averages[name]) for name, part in self.parameters.named() if self._averages]
        before = [part.detach().clone() for part, _ in weights]
        try:
            for part, average in weights:
                _replace(part, average)
            yield
        finally:
            for (part, _), kept in zip(weights, before, strict=True):
                _replace(part, kept)

    def memory_bytes(self) -> dict[MemoryKind, int]:
        """Bytes of the averages."""
        held = (part.numel() * _wide(part.dtype).itemsize for _, part in self.parameters.named())
        return {"optimizer_state": sum(held)}

    def state_slices(self) -> dict[str, TensorSlice | None]:
        """The parameters that this rank trains, and of which it has a slice."""
        return self.parameters.slices()

    def state_dict(self) -> dict[str, Any]:
        """`average` of each parameter (its shape, float32 at least); an empty entry before the first step."""
        every = self._averages
        return {name: {"average": every[name]} if every else {} for name, _ in self.parameters.named()}

    def forecast_state(self) -> dict[str, Any]:
        """Return the shapes and dtypes of the averages, on the meta device."""
        return {
            name: {"average": torch.empty_like(part, dtype=_wide(part.dtype), device="meta")}
            for name, part in self.parameters.named()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy saved averages; KeyError for those of other parameters."""
        named = dict(self.parameters.named())
        if state and named.keys() != state.keys():
            raise KeyError(f"averages differ for {sorted(named.keys() ^ state.keys())}")
        self._averages = {
            name: _widened(parts["average"].to(named[name].device, copy=True)) for name, parts in state.items() if parts
        }


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(_wide(tensor.dtype))


@torch.no_grad()
def _replace(parameter: nn.Parameter, value: Tensor) -> None:
    """Change a parameter in place, by which its casts are known to be old."""
    parameter.copy_(value)
