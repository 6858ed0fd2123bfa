"""Sums by layer over a step's forward passes."""

from collections.abc import Mapping

import torch
from torch import Tensor

from drawloom import internal
from drawloom.graph import component_base_class
from drawloom.ports import Accumulator, Device, Metric, MetricTotals, Step


@component_base_class
class PassSums(Metric):
    """Metric with sums; observers of a rank's layers add to them in every forward pass."""

    device: Device

    _sums: Tensor = internal(factory=lambda: torch.zeros(0, dtype=torch.float64))

    def allocate_sums(self, *shape: int) -> None:
        """Start with sums of this shape, the same on all ranks."""
        self._sums = torch.zeros(shape, dtype=torch.float64, device=self.device.device)

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """The sums, by layer."""
        return {"sums": Accumulator(shape=tuple(self._sums.shape), scope="activations")}

    def forget_passes(self) -> None:
        self._sums.zero_()

    def measure_on_rank(self, step: Step) -> MetricTotals:
        """Return the sums over the forward passes since the last step, float64 (layers, ...)."""
        sums = self._sums.clone()
        self._sums.zero_()  # in place: observers that are part of a CUDA graph add to this tensor
        return {"sums": sums}
