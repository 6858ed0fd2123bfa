"""States of torch optimizers by parameter name, as checkpoints have them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drawloom.components.optim.gradient_steps import ADAM_MOMENTS
from drawloom.ports import NodeState


def load_named_state(
    optimizers: Sequence[torch.optim.Optimizer],
    named: Sequence[tuple[str, nn.Parameter]],
    state: NodeState,
    moments: Mapping[str, Sequence[str]],
    omitted: Mapping[str, Collection[str]],
) -> None:
    """
    Replace the optimizers' state by a copy of a saved state, empty before the first step.

    `moments` are the running means' names by parameter; means of another optimizer are not loaded. `omitted` keys by
    parameter are left out, because torch would copy them to the device. Raises KeyError for other parameters' state,
    and ValueError without one of the means.
    """
    if state and moments.keys() != state.keys():
        raise KeyError(f"optimizer state differs for {sorted(moments.keys() ^ state.keys())}")
    for name, saved in state.items():
        if saved and (missing := {*moments[name]} - saved.keys()):
            raise ValueError(f"{name} has {', '.join(saved)}, and not {', '.join(sorted(missing))}")
    keys = {name: {"step", *means} - {*omitted.get(name, ())} for name, means in moments.items()}
    names = {parameter: name for name, parameter in named}
    for optimizer in optimizers:
        ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        values = {number: _copy_tensors(state[name], keys[name]) for number, name in enumerate(ordered) if state}
        # torch moves each tensor to its parameter's device: a fused optimizer counts its steps on the accelerator.
        optimizer.load_state_dict({"state": values, "param_groups": optimizer.state_dict()["param_groups"]})


def _copy_tensors(parts: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Copy the tensors with these keys, because the optimizer changes its state in place."""
    return {key: part.detach().clone() for key, part in parts.items() if key in keys and isinstance(part, Tensor)}


def create_state_on_meta(parameter: nn.Parameter, moments: Sequence[str]) -> dict[str, Tensor]:
    """Return the shapes and dtypes in torch's state for a parameter."""
    state = {name: torch.empty_like(parameter, device="meta") for name in moments}
    # torch's optimizers with two means count the steps of each parameter for the bias correction
    return {"step": torch.empty((), device="meta"), **state} if {*ADAM_MOMENTS} <= {*moments} else state
