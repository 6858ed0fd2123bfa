"""Steps beyond torch's interface for optimizers, and the names of Adam's state."""

import torch
from torch import Tensor

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names in torch of Adam's running means of gradients and of their squares."""

AMSGRAD_MOMENTS = (*ADAM_MOMENTS, "max_exp_avg_sq")
"""Names in torch of Adam's running means and of the largest mean of squares so far."""


class WideGradientStep(torch.optim.Optimizer):
    """
    Optimizer for gradients in wider dtypes than the weights.

    A step changes nothing if `found_inf`, float32 () on the weights' device, is not 0.
    """

    found_inf: Tensor | None = None
