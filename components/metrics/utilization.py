"""Model FLOPs utilization (MFU)."""

from collections.abc import Mapping

import torch

from drawloom import Every, above, component, internal, setting
from drawloom.ports import (
    Accumulator,
    CountsFlops,
    Device,
    ForwardFlops,
    Loss,
    Mesh,
    MetricTotals,
    MetricValues,
    Precision,
    StageFeature,
    Stages,
    Step,
    Value,
    count_flops_with_loss,
    require_token_batch,
    run_log,
)


@component(impact="safe")
class Utilization:
    """
    `tflops`, the TFLOP/s per device in a step, and `mfu`, their fraction of the device's peak.

    With several devices also `device_tokens_per_second`. Only matrix products in a forward and a backward pass count:
    causal attention within documents, no recomputation by activation checkpointing, and no gradients for frozen
    weights. The seconds are the same as for `tokens_per_second`. The peak for dense products in the compute dtype, also
    if features multiply in a narrower one, comes from `distributed/devices.toml`; for an unknown device there is no
    `mfu`. On a CPU there are no values unless `peak_tflops` is set. A value above the peak, or above the faster peak
    that a feature declares, is impossible: it is reported as an error, and left out.
    """

    device: Device
    mesh: Mesh
    precision: Precision
    stages: Stages
    loss: Loss
    models: Every[CountsFlops]
    features: Every[StageFeature]
    peak_tflops: float | None = setting(
        "the device's peak TFLOP/s; default: a table with known devices", default=None, check=above(0)
    )

    _flops: ForwardFlops | None = internal(None)
    _peak: float | None = internal(None)
    _frozen: set[str] = internal(factory=set)
    _has_warned: bool = internal(False)

    def open(self) -> None:
        """Look up the model's FLOPs, if a model counts them, and the device's peak."""
        device = self.device.device
        if len(self.models) != 1 or (device.type == "cpu" and self.peak_tflops is None):
            return
        [model] = self.models.values()
        self._flops = count_flops_with_loss(model, self.loss)
        self._peak = self.peak_tflops
        if self._peak is None:
            from drawloom.components.distributed.device_model import get_matmul_dtype_key, get_peak_tflops

            dtype = get_matmul_dtype_key(self.precision.compute)
            self._peak = get_peak_tflops(torch.cuda.get_device_name(device), dtype)
        frozen = [
            name
            for stage in self.stages.local
            for name, param in stage.named_masters_or_parameters()
            if not param.requires_grad
        ]
        self._frozen = set().union(*self.mesh.pipeline_group.gather_json(frozen))

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """The positions, including padding, and the query-key pairs by window."""
        if self._flops is None:
            return {}
        return {
            "positions": Accumulator(scope="rows"),
            "pairs": Accumulator(shape=(len(self._flops.per_pair),), scope="rows"),
        }

    def measure_on_rank(self, step: Step) -> MetricTotals:
        """Return float64 counts: positions (), and query-key pairs by window (windows,)."""
        if self._flops is None:
            return {}
        keys = torch.cat(
            [require_token_batch(batch, "utilization").visible_keys.flatten() for batch in step.state["batches"]]
        )
        pairs = [float((keys if window is None else keys.clamp(max=window)).sum()) for window in self._flops.per_pair]
        return {
            "positions": torch.tensor(float(len(keys)), dtype=torch.float64),
            "pairs": torch.tensor(pairs, dtype=torch.float64),
        }

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return the values per device, as means over ranks; None if they exceed the device's peak."""
        if self._flops is None or step.interval is None:
            return {}
        device_seconds = self.mesh.world.size * step.interval.training_seconds
        pairs = dict(zip(self._flops.per_pair, totals["pairs"].tolist(), strict=True))
        flops = self._flops.count_training_flops(int(totals["positions"]), pairs, self._frozen)
        values: dict[str, Value] = {"tflops": flops / device_seconds / 1e12}
        if self.mesh.world.size > 1:
            values = {"device_tokens_per_second": step.tokens / device_seconds, **values}
        if self._peak is None:
            return values
        values["mfu"] = mfu = flops / device_seconds / 1e12 / self._peak
        if mfu <= max((feature.peak_factor for feature in self.features.values()), default=1):
            return values
        if not self._has_warned:
            self._has_warned = True
            run_log.error(
                "step %d: the meter of metrics.utilization is wrong, it measured %.3g times the device's peak of %g "
                "TFLOP/s; such steps have no tflops and mfu; correct metrics.utilization.peak_tflops if this is not "
                "the device's peak, otherwise report the error",
                step.index,
                mfu,
                self._peak,
            )
        return dict.fromkeys(values)
