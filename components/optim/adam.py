"""Adam: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1."""

import torch

from drawloom import at_least, component, setting
from drawloom.components.optim.adam_settings import AdamSettings


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
