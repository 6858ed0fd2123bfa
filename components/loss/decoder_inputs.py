"""Model inputs for decoder losses."""

from typing import ClassVar

from torch import Tensor

from drawloom.ports import Head, TokenBatch, TokenContext


class DecoderInputs:
    """Base class for losses of models that read token ids."""

    batch_leaves: ClassVar[tuple[str, ...]] = ("tokens", "targets", "positions", "document_ids", "weights")

    def inputs(self, batch: TokenBatch) -> tuple[Tensor, TokenContext]:
        """Return token ids, int64 (rows, length), for the first stage, and the context for all stages."""
        context = TokenContext(batch.positions, batch.document_ids, batch.weights, padding=batch.padding)
        return batch.tokens, context


def compute_target_logps(hidden: Tensor, head: Head, batch: TokenBatch) -> Tensor:
    """
    Return the log-probabilities of targets with a weight, at least float32 (rows, length), 0 elsewhere.

    hidden: (rows, length, hidden_size). Differentiable.
    """
    return -head.token_losses(hidden, batch.targets, (batch.weights > 0).float())[0]
