"""AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2."""

from typing import ClassVar

import torch

from drawloom import at_least, component, setting
from drawloom.components.optim.adam import AdamSettings
from drawloom.components.optim.parameter_groups import find_betas_fault
from drawloom.components.optim.torch_optimizer import create_fastest_adamw


@component(reads=("gradients", "lr_factor?", "skip?"), writes=("weights", "lr"))
class AdamW(AdamSettings):
    """AdamW with decoupled weight decay; norms and biases do not decay."""

    _scales_by_role: ClassVar[bool] = True

    betas: tuple[float, float] = setting(
        "decay rates for the running means of gradients and squared gradients",
        default=(0.9, 0.95),
        check=find_betas_fault,
    )
    weight_decay: float = setting("decoupled weight decay coefficient", default=0.1, check=at_least(0))

    def _create_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            create_fastest_adamw(
                self._create_torch_param_groups(self.eps),
                betas=self.betas,
                eps=self.eps,
                amsgrad=self.amsgrad,
                maximize=self.maximize,
            )
        ]
