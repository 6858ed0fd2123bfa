"""States of torch optimizers by parameter name, as checkpoints have them."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from drawloom.components.optim.gradient_steps import ADAM_MOMENTS
from drawloom.ports import NodeState

Named = Sequence[tuple[str, nn.Parameter]]


def load_named_state(
    optimizers: Sequence[torch.optim.Optimizer],
    named: Named,
    state: NodeState,
    omitted: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> None:
    """
    Replace the optimizers' state by a copy of a saved state, empty before the first step.

    `omitted` keys by parameter are left out, because torch would copy them to the device. Raises KeyError for other
    parameters' state.
    """
    parameters = dict(named)
    if state and parameters.keys() != state.keys():
        raise KeyError(f"optimizer state differs for {sorted(parameters.keys() ^ state.keys())}")
    names = {parameter: name for name, parameter in named}
    for optimizer in optimizers:
        ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        kept = [(number, state.get(name, {}), omitted.get(name, ())) for number, name in enumerate(ordered)]
        values = {number: values for number, parts, keys in kept if (values := _copy_tensors(parts, keys))}
        # torch moves each tensor to its parameter's device: a fused optimizer counts its steps on the accelerator.
        optimizer.load_state_dict({"state": values, "param_groups": optimizer.state_dict()["param_groups"]})


def _copy_tensors(parts: dict[str, Any], omitted: Collection[str]) -> dict[str, Any]:
    """Copy tensors, because the optimizer changes its state in place; without the omitted keys."""
    kept = {key: part for key, part in parts.items() if key not in omitted}
    return {key: part.detach().clone() if isinstance(part, Tensor) else part for key, part in kept.items()}


def create_state_on_meta(parameter: nn.Parameter, moments: Sequence[str]) -> dict[str, Tensor]:
    """Return the shapes and dtypes in torch's state for a parameter."""
    state = {name: torch.empty_like(parameter, device="meta") for name in moments}
    # torch's optimizers with two means count the steps of each parameter for the bias correction
    return {"step": torch.empty((), device="meta"), **state} if {*ADAM_MOMENTS} <= {*moments} else state
