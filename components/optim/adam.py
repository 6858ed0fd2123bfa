"""Adam: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1."""

from collections.abc import Sequence

import attrs
import torch

from drawloom.components.optim.parameter_groups import AdamGroup, check_betas
from drawloom.components.optim.torch_optimizer import ADAM_MOMENTS, TorchOptimizer
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.stages import Parameters
from drawloom.graph import above, at_least, component, setting


@component(reads=("gradients", "lr_factor?", "skip?"), writes=("weights", "lr"))
class Adam(TorchOptimizer):
    """Adam, with weight decay as a part of the gradient; norms and biases do not decay."""

    parameters: Parameters
    mesh: Mesh
    lr: float = setting(check=above(0), doc="the base learning rate")
    betas: tuple[float, float] = setting(default=(0.9, 0.999), check=check_betas, doc="decay of the two running means")
    eps: float = setting(default=1e-8, check=above(0), doc="keeps the denominator from zero")
    weight_decay: float = setting(default=0.0, check=at_least(0), doc="added to the gradient, times the weight")
    groups: list[AdamGroup] = setting(
        factory=list, doc="parameters that are trained otherwise than the rest; the first that names one has it"
    )
    _optimizers: list[torch.optim.Optimizer] = attrs.field(init=False, factory=list)

    def moments(self) -> dict[str, Sequence[str]]:
        """Return the means of gradients and of their squares for every parameter."""
        return {name: ADAM_MOMENTS for name, _ in self.parameters.named()}

    def open(self) -> None:
        """Create the optimizer of the parameters."""
        groups = self._param_groups()
        adam = torch.optim.Adam(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)
        self._optimizers = [adam]
