"""Gradient clipping by total norm."""

import torch

from drawloom import above, component, setting
from drawloom.ports import Parameters, Step


@component(reads=("grad_norm",), changes=("gradients",))
class ClipNorm:
    """Clipping for all gradients by one factor, to a total norm of at most `max_norm`."""

    parameters: Parameters
    max_norm: float = setting("maximum total 2-norm after clipping", check=above(0))

    def run_phase(self, step: Step) -> None:
        """Scale the gradients by max_norm / norm if it is below 1; `grad_norm` remains the norm before clipping."""
        from drawloom.kernels.gradients.eager import scale_and_sum_squares

        # 1e-6 as in torch.nn.utils.clip_grad_norm_, because the norm may be 0
        factor = self.max_norm / (step.state["grad_norm"] + 1e-6)
        gradients = [
            parameter.grad for _, parameter in self.parameters.named_parameters() if parameter.grad is not None
        ]
        scale_and_sum_squares(gradients, torch.where(factor < 1, factor, 1.0))
