"""AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2."""

from collections.abc import Sequence

import attrs
import torch

from drawloom.components.optim.adamw_step import adamw
from drawloom.components.optim.parameter_groups import AdamGroup, check_betas
from drawloom.components.optim.torch_optimizer import ADAM_MOMENTS, TorchOptimizer
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.stages import Parameters
from drawloom.graph import above, at_least, component, setting


@component(reads=("gradients", "lr_factor?", "skip?"), writes=("weights", "lr"))
class AdamW(TorchOptimizer):
    """AdamW; norms and biases do not decay."""

    parameters: Parameters
    mesh: Mesh
    lr: float = setting(check=above(0), doc="the base learning rate")
    betas: tuple[float, float] = setting(default=(0.9, 0.95), check=check_betas, doc="decay of the two running means")
    eps: float = setting(default=1e-8, check=above(0), doc="keeps the denominator from zero")
    weight_decay: float = setting(default=0.1, check=at_least(0), doc="fraction of a weight lost each step, times lr")
    groups: list[AdamGroup] = setting(
        factory=list, doc="parameters that are trained otherwise than the rest; the first that names one has it"
    )
    _optimizers: list[torch.optim.Optimizer] = attrs.field(init=False, factory=list)

    def moments(self) -> dict[str, Sequence[str]]:
        """Return the means of gradients and of their squares for every parameter."""
        return {name: ADAM_MOMENTS for name, _ in self.parameters.named()}

    def open(self) -> None:
        """Create the optimizer of the parameters."""
        self._optimizers = [adamw(self._param_groups(), lr=self.lr, betas=self.betas, eps=self.eps)]
