"""The loss of a language model: each token predicted from those before it."""

from torch import Tensor

from drawloom.components.ports.data import IGNORE_INDEX, Batch
from drawloom.components.ports.model import BatchContext
from drawloom.graph import component


@component
class NextToken:
    """Cross entropy of the next token, in nats; every token that has a target weighs the same."""

    def inputs(self, batch: Batch) -> tuple[Tensor, BatchContext]:
        """Token ids for the first stage; positions, documents and targets for all."""
        return batch.tokens, BatchContext(batch.positions, batch.document_ids, batch.targets)

    def loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum of losses by token (rows, length), and the number of tokens that have a target."""
        return output.sum(), (batch.targets != IGNORE_INDEX).sum()
