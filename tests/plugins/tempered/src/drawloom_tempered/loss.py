"""Cross entropy of logits that are divided by a trained temperature."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom import above, component, internal, setting
from drawloom.ports import IGNORE_INDEX, BatchContext, Head, TokenBatch, TokenContext


class Temperature(nn.Module):
    """Logarithm of the temperature, (1,)."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.log)


@component
class Tempered:
    """Next-token cross entropy with logits divided by a trained temperature."""

    batch_leaves: ClassVar[tuple[str, ...]] = ("tokens", "targets", "positions", "document_ids", "weights")

    max_bytes: int = setting("bytes of logits that exist together", default=2**26, check=above(0))
    module: nn.Module = internal(factory=Temperature)

    def inputs(self, batch: TokenBatch) -> tuple[Tensor, BatchContext]:
        """Return token ids, int64 (rows, length), for the first stage, and the context for all stages."""
        return batch.tokens, TokenContext(batch.positions, batch.document_ids, batch.weights)

    def loss(self, hidden: Tensor, head: Head, batch: TokenBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the weighted sum of token losses and the sum of weights; hidden is (rows, length, hidden_size)."""
        losses = head.map_logits(self._losses, hidden, batch.targets, max_bytes=self.max_bytes)
        return (losses * batch.weights).sum(), batch.weights.sum(), {}

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return losses (tokens,) for logits (tokens, vocab_size)."""
        tempered = logits / self.module.get_parameter("log").exp()
        return F.cross_entropy(tempered, targets, ignore_index=IGNORE_INDEX, reduction="none")
