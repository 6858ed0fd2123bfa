"""Number by which a layer's output is multiplied (Gemma 4)."""

import torch
from torch import Tensor, nn


class LayerScalar(nn.Module):
    """Multiplication by a number, `factor` (1,), which files have, and which is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(1))

    def reset_parameters(self) -> None:
        """Fill the factor with 1."""
        self.get_buffer("factor").fill_(1.0)

    def forward(self, hidden: Tensor) -> Tensor:
        """Multiply hidden states (rows, length, hidden_size), of any floating dtype."""
        return hidden * self.get_buffer("factor").to(hidden.dtype)
