"""The loss's named sums in a step's state, in total and by microbatch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.pipeline import LOSSES
from drawloom.components.ports.run import Step
from drawloom.graph import UserError


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


def sum_tensor_over_microbatches(losses: Mapping[str, Any], name: str, shape: tuple[int, ...], setting: str) -> Tensor:
    """Return a named sum over this rank's microbatches, float64 (*shape,). Raises UserError for other shapes."""
    total = _read_values_by_microbatch(losses, name).double().sum(0)
    if total.shape != shape:
        text = f"the loss's sum {name!r} has shape {tuple(total.shape)}, and the metric needs shape {shape}"
        raise UserError(
            f"{text}; write the loss's value in the metric's `{setting}`, or name another sum in `of`", exit_code=2
        )
    return total


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
            f"the loss has no sum called {name!r}, but a metric reads it; write one of {known}",
            exit_code=2,
        )
    value: Tensor = values[name]
    return value
