"""Layer whose output is multiplied by a number (Gemma 4)."""

from typing import Any

import torch
from torch import Tensor

from drawloom.components.model.decoder.layer import Block
from drawloom.components.model.decoder.specs import LayerContext


class ScaledBlock(Block):
    """Layer whose output is multiplied by `layer_scalar` (1,), which files have, and which is not trained."""

    layer_scalar: Tensor

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.register_buffer("layer_scalar", torch.ones(1))

    def reset_parameters(self) -> None:
        """Fill the number with 1."""
        self.layer_scalar.fill_(1.0)

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Return the layer's result times its number: (rows, length, width)."""
        return super().forward(hidden, context) * self.layer_scalar.to(hidden.dtype)
