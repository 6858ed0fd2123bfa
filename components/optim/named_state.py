"""An optimizer's state by the names of parameters, so that it does not depend on their order or layout."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

Named = Sequence[tuple[str, nn.Parameter]]


def named_state(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, Any]:
    """Parameter name to what the optimizer keeps for it; empty before the first step."""
    return {name: dict(optimizer.state[parameter]) for name, parameter in named if parameter in optimizer.state}


def load_named_state(optimizer: torch.optim.Optimizer, named: Named, state: dict[str, Any]) -> None:
    """Put saved state in place, also into an optimizer that has never stepped."""
    parameters = dict(named)
    if state and parameters.keys() != state.keys():
        raise KeyError(f"optimizer state differs for {sorted(parameters.keys() ^ state.keys())}")
    optimizer.state.clear()
    for name, values in state.items():
        optimizer.state[parameters[name]] = {key: _placed(part, parameters[name]) for key, part in values.items()}


def _placed(part: Any, parameter: nn.Parameter) -> Any:
    """A copy of a saved value, on the parameter's device if it has the parameter's shape."""
    if not isinstance(part, Tensor):
        return part
    return part.detach().clone().to(parameter.device) if part.shape == parameter.shape else part.detach().clone()
