"""The norm of all gradients of a model, as if they were one vector."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drawloom.components.ports.distributed import Reduce


def total_norm(gradients: Sequence[Tensor], reduce: Reduce) -> float:
    """The 2-norm over these gradients and those of ranks that hold others; summed in float64, so in any layout."""
    norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float64) if gradients else []
    squares = torch.stack(list(norms)).square().sum() if norms else torch.zeros((), dtype=torch.float64)
    return float(reduce.total(squares).sqrt())
