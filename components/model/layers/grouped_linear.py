"""A linear layer for each expert."""

import torch
from torch import Tensor, nn

from drawloom.components.ports.model import ExpertKernels


class GroupedLinear(nn.Module):
    """x @ weight[expert].T for rows that are sorted by expert; (rows, inputs) to (rows, outputs)."""

    def __init__(self, experts: int, inputs: int, outputs: int, kernels: ExpertKernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.kernels = kernels

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.kernels.grouped_gemm(x, self.weight, ends, transposed=True)
