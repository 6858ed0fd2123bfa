"""Layers that compute with the recipe's kernels: linear, RMSNorm, embedding."""

import torch
from torch import Tensor, nn

from drawloom.components.ports.model import Kernels


class Linear(nn.Linear):
    """x @ weight.T, without a bias; the weight is (outputs, inputs)."""

    def __init__(self, inputs: int, outputs: int, kernels: Kernels) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs), of any floating dtype, to (..., outputs), in the weight's dtype."""
        return self.kernels.linear(x.to(self.weight.dtype), self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; the weight is (width,)."""

    def __init__(self, width: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) in and out, of the dtype of `x`."""
        return self.kernels.rms_norm(x, self.weight, self.eps)


class Embedding(nn.Embedding):
    """The embedding table: a vector, a row of `weight` (vocab_size, hidden_size), for each token."""

    def __init__(self, vocabulary: int, width: int, kernels: Kernels) -> None:
        super().__init__(vocabulary, width)
        self.kernels = kernels

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids, int64 (...), to vectors (..., hidden_size) of the weight's dtype."""
        return self.kernels.embedding(tokens, self.weight)
