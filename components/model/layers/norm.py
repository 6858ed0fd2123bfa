"""RMSNorm with a learned weight."""

import torch
from torch import Tensor, nn

from drawloom.components.ports.model import Kernels


class RMSNorm(nn.Module):
    """Normalises the last dimension of (..., width)."""

    def __init__(self, width: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)
