"""Stochastic gradient descent with momentum."""

import attrs
import torch

from drawloom.components.optim.torch_optimizer import TorchOptimizer, decay_groups
from drawloom.components.ports.model import Parameters
from drawloom.graph import above, at_least, between, component, setting


@component(reads=("gradients", "lr_factor?"), writes=("weights", "lr"))
class SGD(TorchOptimizer):
    """SGD with momentum; norms and biases do not decay."""

    parameters: Parameters
    lr: float = setting(check=above(0), doc="the base learning rate")
    momentum: float = setting(default=0.9, check=between(0, 1), doc="decay of the running mean of gradients")
    weight_decay: float = setting(default=0.0, check=at_least(0), doc="added to the gradient, times the weight")
    _optimizer: torch.optim.Optimizer = attrs.field(init=False, default=None)

    @property
    def moments(self) -> int:
        """One, the mean of gradients, if there is momentum."""
        return 1 if self.momentum else 0

    def open(self) -> None:
        """Create the optimizer of the parameters."""
        groups = decay_groups(self.parameters.named(), self.weight_decay)
        self._optimizer = torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, fused=True)
