"""Which parameters decay: matrices do; norms, biases and other vectors do not."""

from collections.abc import Sequence
from typing import Any

from torch import nn


def decays(parameter: nn.Parameter) -> bool:
    """Whether a parameter decays."""
    return parameter.ndim >= 2


def decay_groups(named: Sequence[tuple[str, nn.Parameter]], decay: float) -> list[dict[str, Any]]:
    """
    Parameter groups for a torch optimizer; those with fewer than two dimensions get no weight decay.

    Both groups are there even if they are empty: torch takes no list without groups, and a pipeline rank whose
    parameters are all frozen has none to train.
    """
    matrices = [parameter for _, parameter in named if decays(parameter)]
    vectors = [parameter for _, parameter in named if not decays(parameter)]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
