"""An optimizer's state by the names of parameters, so that it does not depend on their order or layout."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

Named = Sequence[tuple[str, nn.Parameter]]


def named_state(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, Any]:
    """Parameter name to what the optimizer keeps for it: nothing before the first step that gave it a gradient."""
    return {name: dict(optimizer.state.get(parameter, {})) for name, parameter in named}


def load_named_state(optimizer: torch.optim.Optimizer, named: Named, state: dict[str, Any]) -> None:
    """
    Replace an optimizer's state by a copy of a saved one; an empty one is that of an optimizer that has not stepped.

    Raises KeyError for state of other parameters.
    """
    parameters = dict(named)
    if state and parameters.keys() != state.keys():
        raise KeyError(f"optimizer state differs for {sorted(parameters.keys() ^ state.keys())}")
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {parameter: number for number, parameter in enumerate(every)}
    values = {numbers[parameters[name]]: _copies(parts) for name, parts in state.items() if parts}
    # The optimizer itself decides where each tensor belongs: a fused one counts its steps on the device.
    optimizer.load_state_dict({"state": values, "param_groups": optimizer.state_dict()["param_groups"]})


def _copies(parts: dict[str, Any]) -> dict[str, Any]:
    """Tensors that the optimizer may change in place."""
    return {key: part.detach().clone() if isinstance(part, Tensor) else part for key, part in parts.items()}
