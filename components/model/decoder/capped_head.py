"""Head whose logits are bounded by a tanh (Gemma 2 and 4)."""

import attrs
import torch
from torch import Tensor

from drawloom.components.model.layers import ChunkedHead


@attrs.define(eq=False)
class CappedHead(ChunkedHead):
    """Head whose logits are `cap` * tanh(logits / cap) for another head's logits, which `project` computes."""

    cap: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.project(hidden)
        return self.cap * (logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.cap).tanh()
