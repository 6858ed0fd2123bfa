"""Which parameters decay: matrices do; norms, biases and other vectors do not."""

from collections.abc import Sequence
from typing import Any

from torch import nn


def decays(parameter: nn.Parameter) -> bool:
    """Whether a parameter decays."""
    return parameter.ndim >= 2


def decay_groups(named: Sequence[tuple[str, nn.Parameter]], decay: float) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer; those with fewer than two dimensions get no weight decay."""
    matrices = [parameter for _, parameter in named if decays(parameter)]
    vectors = [parameter for _, parameter in named if not decays(parameter)]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
