"""Histograms of gradients and weights, by parameter name patterns."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from drawloom import UserError, between, component, internal, setting
from drawloom.ports import (
    Accumulator,
    Cadence,
    Device,
    Histogram,
    Mesh,
    MetricTotals,
    MetricValues,
    Parameters,
    Step,
    describe_cadence_fault,
    is_due,
)

MAX_BINS = 512
"""Maximum that trackers accept (Aim, Weights & Biases)."""

CHUNK = 2**22
"""Elements that are counted at once, which bounds memory: 64 MB for their bins and bounds."""


def find_targets_fault(patterns: list[str]) -> str | None:
    """Check the setting: return why parameter name patterns are invalid, or None."""
    return None if patterns else 'an empty list names no parameter; write ["*"] for all'


@component(reads=("gradients",), impact="safe")
class Histograms:
    """
    Histograms `gradients/<name>` and `weights/<name>` by parameter name, for trackers that accept distributions.

    A phase, between clipping and the optimizer, and a metric. A histogram counts a whole model parameter, or all
    parameters that match a pattern, with the same result on every mesh: its bins lie between the minimum and the
    maximum over all ranks, and one rank counts an element. Non-finite elements are ignored.
    """

    parameters: Parameters
    mesh: Mesh
    device: Device
    targets: list[str] = setting("parameter name patterns (fnmatch)", check=find_targets_fault)
    of: tuple[Literal["gradients", "weights"], ...] = setting(
        "tensors to count by parameter", default=("gradients", "weights")
    )
    per: Literal["parameter", "pattern"] = setting(
        "one histogram per parameter, or one per pattern for all its matches", default="parameter"
    )
    bins: int = setting(f"bins of a histogram, at most {MAX_BINS}", default=64, check=between(1, MAX_BINS + 1))
    every: Cadence = setting(
        'steps between histograms, or "last" or "never"', default=100, check=describe_cadence_fault
    )

    _series: list[str] = internal(factory=list)
    _measured: dict[str, Tensor] = internal(factory=dict)

    def open(self) -> None:
        """Gather the model's parameter names. Raises UserError for a pattern without a match."""
        local = [name for name, _ in self.parameters.named_parameters()]
        names = sorted({name for names in self.mesh.pipeline_group.gather_json(local) for name in names})
        for pattern in self.targets:
            if not any(fnmatchcase(name, pattern) for name in names):
                text = f"metrics.histograms: the pattern {pattern!r} of `targets` matches no trained parameter"
                raise UserError(f"{text}; one is called {names[len(names) // 2]!r}" if names else text, exit_code=2)
        matched = [name for name in names if any(fnmatchcase(name, pattern) for pattern in self.targets)]
        series = matched if self.per == "parameter" else self.targets
        self._series = [f"{kind}/{name}" for kind in self.of for name in series]

    def run_phase(self, step: Step) -> None:
        """Count elements in gradients and weights while there are gradients, at the steps in `every`."""
        self._measured = {}
        if is_due(self.every, step):
            parts = [*self._iterate_chunks_by_histogram()]
            low, high = self._find_extremes_over_ranks(parts)
            # Count this rank's elements by histogram and bin: float64 (histograms, bins)
            counts = torch.zeros(len(self._series), self.bins, dtype=torch.float64, device=low.device)
            for index, chunk in parts:
                scaled = (chunk.double() - low[index]) * (self.bins / (high[index] - low[index]))
                finite = chunk.isfinite()
                bins = torch.where(finite, scaled, 0.0).clamp(0, self.bins - 1).long()
                counts[index].index_add_(0, bins, finite.double())
            self._measured = {"low": low, "high": high, "counts": counts}

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """Bounds and counts by histogram; replicas count the same."""
        size = len(self._series)
        return {
            "low": Accumulator("min", (size,)),
            "high": Accumulator("max", (size,)),
            "counts": Accumulator(shape=(size, self.bins), scope="model"),
        }

    def measure_on_rank(self, step: Step) -> MetricTotals:
        """Return the bounds, float64 (histograms,), and this rank's counts (histograms, bins), or {} between steps."""
        measured, self._measured = self._measured, {}
        return measured

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return {}, because distributions are not numbers."""
        return {}

    def distributions(self, totals: MetricTotals, step: Step) -> Mapping[str, Histogram]:
        """Return a measured step's histograms, without tensors that have no finite element."""
        bounds = zip(self._series, totals["low"].tolist(), totals["high"].tolist(), strict=True)
        return {
            name: Histogram(low, high, tuple(counts))
            for (name, low, high), counts in zip(bounds, totals["counts"].tolist(), strict=True)
            if low < high < float("inf")
        }

    def _iterate_chunks_by_histogram(self) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's gradients and weights in flat chunks, once per histogram index in which they count."""
        for name, parameter in self.parameters.owned_parameters():
            for kind in self.of:
                tensor = parameter if kind == "weights" else parameter.grad
                chunks = () if tensor is None else torch.split(tensor.detach().flatten(), CHUNK)
                yield from ((index, chunk) for index in self._find_histogram_indices(kind, name) for chunk in chunks)

    def _find_histogram_indices(self, kind: str, name: str) -> list[int]:
        """Return the indices of the histograms that count a parameter's gradients or weights (`kind`)."""
        matching = [pattern for pattern in self.targets if fnmatchcase(name, pattern)]
        names = matching if self.per == "pattern" else [name] if matching else []
        return [self._series.index(f"{kind}/{label}") for label in names]

    def _find_extremes_over_ranks(self, indexed_chunks: list[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the finite minimum and maximum over all ranks, float64 (histograms,), widened if they are equal."""
        size, device = len(self._series), self.device.device
        bounds = torch.full((2, size), float("-inf"), dtype=torch.float64, device=device)
        for index, chunk in indexed_chunks:
            if chunk.numel():
                finite = chunk.isfinite()
                chunk_bounds = torch.stack(
                    [torch.where(finite, -chunk, float("-inf")).max(), torch.where(finite, chunk, float("-inf")).max()]
                )
                bounds[:, index] = torch.maximum(bounds[:, index], chunk_bounds.double())
        self.mesh.world.max(bounds)
        low, high = -bounds[0], bounds[1]
        margin = 0.5 * (low == high)
        return low - margin, high + margin
