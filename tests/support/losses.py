"""A small head with a batch for it, and the losses over them."""

from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.model.layers import LinearHead
from drawloom.components.parallel.tensor_ranks import ALONE
from drawloom.components.ports.data import IGNORE_INDEX, TokenBatch
from support.qwen3 import kernels_on

CPU = torch.device("cpu")


@attrs.frozen
class Sample:
    """Hidden states (3, 5, 8) and a head's weight (11, 8), both with gradients, and a batch of 3 rows of 5 tokens."""

    hidden: Tensor
    weight: Tensor
    batch: TokenBatch

    def head(self, device: torch.device = CPU, **choices: Any) -> LinearHead:
        """Return the head with these kernels."""
        return LinearHead(self.weight, len(self.weight), kernels_on(device, **choices), ALONE)

    def logits(self) -> Tensor:
        """Return all logits (3, 5, 11)."""
        return self.hidden @ self.weight.T


def sample(dtype: torch.dtype = torch.float64, device: torch.device = CPU) -> Sample:
    """Return always the same numbers; some tokens have no target, and others have weights other than 1."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, 8, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
    weight = torch.randn(11, 8, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
    tokens, targets = torch.randint(11, (2, 3, 5), generator=generator)
    targets[:, 2] = IGNORE_INDEX
    weights = torch.rand(3, 5, generator=generator).masked_fill(targets == IGNORE_INDEX, 0)
    positions = torch.arange(5).repeat(3, 1)
    parts = tokens, targets, positions, torch.zeros_like(tokens), weights
    return Sample(hidden, weight, TokenBatch(*(part.to(device) for part in parts)))
