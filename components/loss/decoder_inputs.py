"""Model inputs that all losses of decoders share."""

from typing import ClassVar

from torch import Tensor

from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.model import TokenContext


class DecoderInputs:
    """Base of losses whose model reads token ids."""

    batch_leaves: ClassVar[tuple[str, ...]] = ("tokens", "targets", "positions", "document_ids", "weights")

    def inputs(self, batch: TokenBatch) -> tuple[Tensor, TokenContext]:
        """Return token ids, int64 (rows, length), for the first stage; positions, documents and weights for all."""
        return batch.tokens, TokenContext(batch.positions, batch.document_ids, batch.weights)
