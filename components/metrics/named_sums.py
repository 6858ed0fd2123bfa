"""The loss's named sums in a step's state, in total and by microbatch."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from drawloom import UserError
from drawloom.graph import component_base_class
from drawloom.ports import LOSSES, Accumulator, Mesh, Metric, MetricTotals, Step


def read_losses_on_last_stage(step: Step) -> Mapping[str, Any] | None:
    """Return the step's value `losses`, the losses by microbatch, or None on ranks without the last stage."""
    losses: Mapping[str, Any] | None = step.state.get(LOSSES)
    return None if losses is None or not len(losses["weight"]) else losses


def sum_weights(losses: Mapping[str, Any]) -> Tensor:
    """Sum the weights over this rank's microbatches: float64 ()."""
    weight: Tensor = losses["weight"]
    return weight.double().sum()


def sum_scalar_over_microbatches(losses: Mapping[str, Any], name: str) -> Tensor:
    """Return a named sum, or `loss`, over this rank's microbatches: float64 (). Raises UserError for tensors."""
    total = _read_values_by_microbatch(losses, name).double().sum(0)
    if total.ndim:
        raise UserError(
            f"the loss's sum {name!r} is a tensor of shape {tuple(total.shape)}, and the metric needs a number; "
            "write the name of a sum that is a number, or use another metric",
            exit_code=2,
        )
    return total


@component_base_class
class SummedTensor(Metric):
    """Metric of a tensor among the loss's named sums, over all microbatches and replicas."""

    size_setting: ClassVar[str]

    of: str

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the sum, by the setting `size_setting`."""

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """The sum."""
        return {"sum": Accumulator(shape=self.shape)}

    def measure_on_rank(self, step: Step) -> MetricTotals:
        """Return this rank's sum, float64 of `shape`, or {} on ranks without the last stage. Raises UserError."""
        if (losses := read_losses_on_last_stage(step)) is None:
            return {}
        total = _read_values_by_microbatch(losses, self.of).double().sum(0)
        if total.shape != self.shape:
            text = f"the loss's sum {self.of!r} has shape {tuple(total.shape)}, and the metric needs shape {self.shape}"
            raise UserError(
                f"{text}; write the loss's value in the metric's `{self.size_setting}`, or name another sum in `of`", 2
            )
        return {"sum": total}


def compute_microbatch_means_over_context(losses: Mapping[str, Any], name: str, mesh: Mesh) -> Tensor:
    """
    Divide a named sum by the weights, by microbatch: float64 (microbatches,), NaN if all weights are 0.

    Collective along `context`: ranks with parts of the same rows return the mean over whole rows.
    """
    sum_scalar_over_microbatches(losses, name)
    both = torch.stack([_read_values_by_microbatch(losses, name).double(), losses["weight"].double()])
    mesh.context_group.sum(both)
    return both[0] / both[1]


def _read_values_by_microbatch(losses: Mapping[str, Any], name: str) -> Tensor:
    """Return a named sum's value, or the loss, for every microbatch: (microbatches, ...). Raises UserError."""
    values = {"loss": losses["loss"], **losses["sums"]}
    if name not in values:
        known = ", ".join(values)
        raise UserError(
            f"the loss has no sum called {name!r}, but a metric reads it; write one of {known}", exit_code=2
        )
    value: Tensor = values[name]
    return value
