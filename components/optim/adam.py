"""Adam: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1."""

from collections.abc import Sequence

import torch

from drawloom import above, at_least, component, setting
from drawloom.components.optim.gradient_steps import ADAM_MOMENTS, AMSGRAD_MOMENTS
from drawloom.components.optim.parameter_groups import AdamGroup, find_betas_fault
from drawloom.components.optim.torch_optimizer import TorchOptimizer
from drawloom.graph import component_base_class
from drawloom.ports import Mesh, Parameters


@component_base_class
class AdamSettings(TorchOptimizer):
    """Settings and state size of torch's Adam and AdamW, which differ in their weight decay."""

    parameters: Parameters
    mesh: Mesh
    lr: float = setting("base learning rate", check=above(0))
    betas: tuple[float, float] = setting(
        "decay rates for the running means of gradients and squared gradients",
        default=(0.9, 0.999),
        check=find_betas_fault,
    )
    eps: float = setting("constant added to the denominator for numerical stability", default=1e-8, check=above(0))
    amsgrad: bool = setting(
        "divide by the largest mean of squares so far (Reddi et al. 2018); keeps a third tensor per parameter",
        default=False,
        impact="incompatible",
    )
    maximize: bool = setting("maximize the objective instead of minimizing it", default=False)
    groups: list[AdamGroup] = setting("parameter groups with their own options; the first match wins", factory=list)

    def moment_names_by_parameter(self) -> dict[str, Sequence[str]]:
        """Return the two running means' names, and with `amsgrad` the largest one's."""
        names = AMSGRAD_MOMENTS if self.amsgrad else ADAM_MOMENTS
        return {name: names for name, _ in self.parameters.named_parameters()}


@component(reads=("gradients", "lr_factor?", "skip?"), writes=("weights", "lr"))
class Adam(AdamSettings):
    """Adam with weight decay as part of the gradient (L2 regularization); norms and biases do not decay."""

    weight_decay: float = setting(
        "L2 weight decay coefficient: the gradient grows by this times the weight", default=0.0, check=at_least(0)
    )

    def _create_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(
                self._create_torch_param_groups(),
                betas=self.betas,
                eps=self.eps,
                amsgrad=self.amsgrad,
                maximize=self.maximize,
                fused=True,
            )
        ]
