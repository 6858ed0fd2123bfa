"""Layer whose output is multiplied by a number (Gemma 4)."""

from typing import Any

import torch
from torch import Tensor, nn

from drawloom.components.model.decoder.layer import Block
from drawloom.components.model.decoder.specs import LayerContext


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


class ScaledBlock(Block):
    """Layer with a number by which its output is multiplied."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.scalar = LayerScalar()

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        scaled: Tensor = self.scalar(super().forward(hidden, context))
        return scaled
