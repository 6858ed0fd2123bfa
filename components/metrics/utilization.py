"""How much of what its device can do a run uses."""

import time
from collections.abc import Callable, Mapping

import attrs
import torch
from torch import Tensor

from drawloom.components.distributed.device_model import peak_of, products_in
from drawloom.components.ports.data import token_batch
from drawloom.components.ports.distributed import Device, Mesh, Precision
from drawloom.components.ports.flops import CountsFlops, ForwardFlops, attended_pairs
from drawloom.components.ports.run import Accumulator, Step, Value
from drawloom.components.ports.stages import LOSS, Stages
from drawloom.components.state.batch import Batch
from drawloom.graph import Every, above, component, setting

SHORTEST = 1e-9  # seconds; a coarse clock may give one time twice


@component(impact="safe")
class Utilization:
    """
    `tflops`, the TFLOP/s of a step by device, and `mfu`, what part of the device's peak that is.

    With several devices there is `device_tokens_per_second`, too. Operations are those of matrix products in a forward
    and a backward pass: attention causal and inside of documents, nothing that is computed again, and no gradients of
    frozen weights. Seconds are those of `tokens_per_second`. The peak, of dense products in the dtype in which layers
    compute, is from `distributed/devices.toml`; without one there is no `mfu`. On a CPU there is nothing of these
    unless `peak_tflops` is set.
    """

    device: Device
    mesh: Mesh
    precision: Precision
    stages: Stages
    models: Every[CountsFlops]
    peak_tflops: float | None = setting(
        default=None, check=above(0), doc="TFLOP/s that a device reaches at most; that of a table if left out"
    )

    clock: Callable[[], float] = attrs.field(init=False, default=time.monotonic)
    _flops: ForwardFlops | None = attrs.field(init=False, default=None)
    _peak: float | None = attrs.field(init=False, default=None)
    _frozen: set[str] = attrs.field(init=False, factory=set)
    _seconds: float = attrs.field(init=False, default=0.0)

    def open(self) -> None:
        """Learn the operations of the model, if there is one that counts them, and the peak of the device."""
        device = self.device.device
        if len(self.models) != 1 or (device.type == "cpu" and self.peak_tflops is None):
            return
        [model] = self.models.values()
        self._flops = model.forward_flops()
        self._peak = self.peak_tflops
        if self._peak is None:
            self._peak = peak_of(torch.cuda.get_device_name(device), products_in(self.precision.compute))
        mine = [
            name for stage in self.stages.local for name, each in stage.named_parameters() if not each.requires_grad
        ]
        everywhere = self.mesh.pipeline_group.gather_json(mine)
        self._frozen = {name for names in everywhere for name in names if not name.startswith(f"{LOSS}.")}

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """The positions, and the pairs of queries and keys of each window: padding is computed, too."""
        if self._flops is None:
            return {}
        return {
            "positions": Accumulator(of="rows"),
            "pairs": Accumulator(shape=(len(self._flops.per_pair),), of="rows"),
        }

    def update(self, step: Step) -> Mapping[str, Tensor]:
        """
        Read the clock, and count what this rank's microbatches have computed, which pipeline ranks have alike.

        `positions` are 0-dimensional, `pairs` (windows,), both float64.
        """
        self._seconds = max(self.clock() - step.started - step.excluded_seconds, SHORTEST)
        if self._flops is None or self.mesh.indices.pipeline:
            return {}
        batches = step.state["batches"]
        pairs = [sum(_attended_pairs(batch, window) for batch in batches) for window in self._flops.per_pair]
        positions = float(sum(batch.weights.numel() for batch in batches))
        return {
            "positions": torch.tensor(positions, dtype=torch.float64),
            "pairs": torch.tensor(pairs, dtype=torch.float64),
        }

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """By device: a mean over the ranks."""
        if self._flops is None:
            return {}
        ranks = self.mesh.world.size
        pairs = dict(zip(self._flops.per_pair, totals["pairs"].tolist(), strict=True))
        tflops = self._flops.of_training(int(totals["positions"]), pairs, self._frozen) / self._seconds / ranks / 1e12
        values: dict[str, Value] = (
            {"device_tokens_per_second": step.tokens / self._seconds / ranks} if ranks > 1 else {}
        )
        return values | {"tflops": tflops} | ({} if self._peak is None else {"mfu": tflops / self._peak})


def _attended_pairs(batch: Batch, window: int | None) -> float:
    return attended_pairs(token_batch(batch, "utilization").document_ids, window)
