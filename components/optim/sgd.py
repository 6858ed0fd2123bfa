"""Stochastic gradient descent with momentum."""

import attrs
import torch

from drawloom.components.optim.parameter_groups import ParameterGroup
from drawloom.components.optim.torch_optimizer import TorchOptimizer
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import Step
from drawloom.components.ports.stages import Parameters
from drawloom.graph import above, at_least, between, component, setting


@component(reads=("gradients", "lr_factor?"), writes=("weights", "lr"))
class SGD(TorchOptimizer):
    """SGD with momentum; norms and biases do not decay."""

    parameters: Parameters
    mesh: Mesh
    lr: float = setting(check=above(0), doc="the base learning rate")
    momentum: float = setting(default=0.9, check=between(0, 1), doc="decay of the running mean of gradients")
    weight_decay: float = setting(default=0.0, check=at_least(0), doc="added to the gradient, times the weight")
    groups: list[ParameterGroup] = setting(
        factory=list, doc="parameters that are trained otherwise than the rest; the first that names one has it"
    )
    _optimizers: list[torch.optim.Optimizer] = attrs.field(init=False, factory=list)

    @property
    def moments(self) -> int:
        """One, the mean of gradients, if there is momentum."""
        return 1 if self.momentum else 0

    def open(self) -> None:
        """Create the optimizer of the parameters."""
        groups = self._param_groups()
        self._optimizers = [torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, fused=True)]

    def run_phase(self, step: Step) -> None:
        """Update the weights unless the step is skipped, and clear the gradients."""
        if step.found_inf is not None and self.momentum:
            self._fill_buffers()
        super().run_phase(step)

    def _fill_buffers(self) -> None:
        """Zeros where torch has no running mean yet: in a first step that is skipped it would leave them unfilled."""
        for _, parameter in self.parameters.named():
            state = self._optimizers[0].state[parameter]
            if parameter.grad is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)
