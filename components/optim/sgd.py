"""Stochastic gradient descent with momentum."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from drawloom.components.optim.parameter_groups import Group
from drawloom.components.optim.torch_optimizer import TorchOptimizer
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.stages import Parameters
from drawloom.graph import above, at_least, between, component, setting


@component(reads=("gradients", "lr_factor?", "skip?"), writes=("weights", "lr"))
class SGD(TorchOptimizer):
    """SGD with momentum; norms and biases do not decay."""

    parameters: Parameters
    mesh: Mesh
    lr: float = setting(check=above(0), doc="the base learning rate")
    momentum: float = setting(default=0.9, check=between(0, 1), doc="decay of the running mean of gradients")
    weight_decay: float = setting(default=0.0, check=at_least(0), doc="added to the gradient, times the weight")
    groups: list[Group] = setting(
        factory=list, doc="parameters that are trained otherwise than the rest; the first that names one has it"
    )
    _optimizers: list[torch.optim.Optimizer] = attrs.field(init=False, factory=list)

    def moments(self) -> dict[str, Sequence[str]]:
        """Return the mean of gradients for every parameter, if there is momentum."""
        names = ("momentum_buffer",) if self.momentum else ()
        return {name: names for name, _ in self.parameters.named()}

    def open(self) -> None:
        """Create the optimizer of the parameters."""
        groups = self._param_groups()
        self._optimizers = [torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, fused=True)]

    def _update(self, optimizer: torch.optim.Optimizer, lr: float, skip: Tensor | None) -> None:
        if skip is not None and self.momentum:
            self._fill_buffers()
        super()._update(optimizer, lr, skip)

    def _fill_buffers(self) -> None:
        """Zeros where torch has no running mean yet: in a first step that is skipped it would leave them unfilled."""
        for _, parameter in self.parameters.named():
            state = self._optimizers[0].state[parameter]
            if parameter.grad is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)
