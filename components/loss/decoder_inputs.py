"""Model inputs that all losses of decoders share."""

from torch import Tensor

from drawloom.components.ports.data import Batch
from drawloom.components.ports.model import BatchContext


class DecoderInputs:
    """Base of losses whose model reads token ids."""

    def inputs(self, batch: Batch) -> tuple[Tensor, BatchContext]:
        """Return token ids, int64 (rows, length), for the first stage; positions, documents and weights for all."""
        return batch.tokens, BatchContext(batch.positions, batch.document_ids, batch.weights)
