"""What a loss left behind of a step, by name: for the whole step, and by microbatch."""

import torch
from torch import Tensor

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.pipeline import Losses
from drawloom.components.ports.run import Step
from drawloom.graph import UserError


def losses_of(step: Step) -> Losses | None:
    """The step's losses, on ranks that hold the last stage; None on others."""
    losses: Losses | None = step.outputs.get("losses")
    return None if losses is None or losses.by_microbatch is None else losses


def total_of(losses: Losses, name: str) -> Tensor:
    """A named sum over this rank's microbatches, or `loss` itself: float64, 0-dimensional. UserError for others."""
    found = _named(losses, name)
    if found.ndim:
        text = f"the loss's sum {name!r} is a tensor of shape {tuple(found.shape)}, and the metric is of one number"
        raise UserError(f"{text}; write the name of another sum, or use another metric", exit_code=2)
    return found


def tensor_sum(losses: Losses, name: str, shape: tuple[int, ...], setting: str) -> Tensor:
    """A named sum of this rank's microbatches, float64 (*shape,); UserError, with the setting, for other shapes."""
    found = _named(losses, name)
    if found.shape != shape:
        text = f"the loss's sum {name!r} has shape {tuple(found.shape)}, and the metric is of one of shape {shape}"
        raise UserError(f"{text}; write another name in `of`, or set `{setting}` as the loss has it", exit_code=2)
    return found


def _named(losses: Losses, name: str) -> Tensor:
    if name == "loss":
        return losses.total
    if name not in losses.sums:
        known = ", ".join(["loss", *losses.sums])
        raise UserError(f"the loss has no sum called {name!r}, which a metric is of; write one of {known}", exit_code=2)
    return losses.sums[name]


def by_microbatch(losses: Losses, name: str, mesh: Mesh) -> Tensor:
    """
    The same divided by the microbatch's weights: float64 (microbatches,), NaN where nothing weighs anything.

    Ranks that share the rows of a microbatch out all have that of whole rows; they call this together.
    """
    total_of(losses, name)
    found = losses.by_microbatch
    if found is None:
        raise ValueError("ranks without the last stage have no losses")
    values: Tensor = found["loss"] if name == "loss" else found["sums"][name]
    weights: Tensor = found["weight"]
    both = torch.stack([values.double(), weights.double()])
    mesh.group("context").sum(both)
    return both[0] / both[1]
