"""Layers that compute with the recipe's kernels: linear, RMSNorm, embedding, and the head that a loss uses."""

from collections.abc import Callable

import attrs
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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

    def __init__(self, vocab_size: int, hidden_size: int, kernels: Kernels) -> None:
        super().__init__(vocab_size, hidden_size)
        self.kernels = kernels

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids, int64 (...), to vectors (..., hidden_size) of the weight's dtype."""
        return self.kernels.embedding(tokens, self.weight)


@attrs.define(eq=False)  # not frozen: torch 2.11 can't trace how a frozen class sets its attributes
class LinearHead:
    """
    A head without a bias: logits are hidden @ weight.T.

    weight: (vocab_size, hidden_size), of a layer or of the embedding that it is tied to.
    """

    weight: Tensor
    kernels: Kernels

    def token_losses(self, hidden: Tensor, targets: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """hidden (..., hidden_size), targets int64 (...), weights float32 (...) to losses and lse, float32 (...)."""
        return self.kernels.linear_cross_entropy(hidden.to(self.weight.dtype), self.weight, targets, weights)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., hidden_size) to (..., vocab_size), in the weight's dtype."""
        return self.kernels.linear(hidden.to(self.weight.dtype), self.weight)

    def mean_logits(self, hidden: Tensor) -> Tensor:
        """(..., hidden_size) to (...), at least float32."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # The mean of the logits is the logit of the weight's mean row: one product with a vector.
        return hidden.to(dtype) @ self.weight.mean(0, dtype=dtype)

    def map_logits(
        self, function: Callable[..., Tensor], hidden: Tensor, *tensors: Tensor, max_bytes: int = 2**28
    ) -> Tensor:
        """`function` of the logits of hidden (..., hidden_size), chunk by chunk; one number by token, (...)."""
        size = max(1, max_bytes // (len(self.weight) * torch.float32.itemsize))
        shape = hidden.shape[:-1]
        flat = [tensor.flatten(0, len(shape) - 1) for tensor in (hidden, *tensors)]
        # Flattened first, so that a chunk may end inside of a row and the bound holds for long rows.
        chunks = zip(*(torch.split(tensor, size) for tensor in flat), strict=True)
        return torch.cat([self._map_chunk(function, *parts) for parts in chunks]).view(shape)

    def _map_chunk(self, function: Callable[..., Tensor], hidden: Tensor, *parts: Tensor) -> Tensor:
        def compute(hidden: Tensor, *parts: Tensor) -> Tensor:
            return function(self.logits(hidden), *parts)

        if not torch.is_grad_enabled():
            return compute(hidden, *parts)
        # Re-entrant checkpoints can't go backward in two parts, as zero-bubble schedules do.
        computed: Tensor = checkpoint(compute, hidden, *parts, use_reentrant=False)
        return computed
