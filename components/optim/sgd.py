"""Stochastic gradient descent with momentum."""

from typing import Any

import attrs
import torch

from drawloom.components.optim.groups import decay_groups
from drawloom.components.optim.named_state import load_named_state, named_state
from drawloom.components.optim.step import apply
from drawloom.components.ports.model import Parameters
from drawloom.components.ports.run import Step
from drawloom.graph import above, at_least, between, component, setting


@component(reads=("gradients", "rate_factor?"), writes=("weights", "lr"))
class SGD:
    """SGD with momentum; norms and biases do not decay."""

    parameters: Parameters
    lr: float = setting(check=above(0), doc="the base learning rate")
    momentum: float = setting(default=0.9, check=between(0, 1), doc="decay of the running mean of gradients")
    weight_decay: float = setting(default=0.0, check=at_least(0), doc="added to the gradient, times the weight")
    _optimizer: torch.optim.Optimizer = attrs.field(init=False, default=None)

    def open(self) -> None:
        """Take the parameters."""
        groups = decay_groups(self.parameters.named(), self.weight_decay)
        self._optimizer = torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, fused=True)

    def run_phase(self, step: Step) -> None:
        """Apply the gradients and drop them."""
        apply(self._optimizer, self.lr, step)

    def state_dict(self) -> dict[str, Any]:
        """The running mean of each parameter."""
        return named_state(self._optimizer, self.parameters.named())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them over."""
        load_named_state(self._optimizer, self.parameters.named(), state)
