"""A length curriculum: at the beginning of a run, documents are cut into shorter ones."""

import attrs
import torch

from drawloom.components.ports.data import Batch
from drawloom.graph import at_least, setting


@attrs.frozen(kw_only=True)
class LengthStage:
    """The greatest length of documents, until a step is done, or until a number of tokens are seen."""

    length: int = setting(check=at_least(2), doc="tokens after which a document is cut")
    until_step: int | None = setting(default=None, check=at_least(1), doc="the last step with this length")
    until_tokens: int | None = setting(
        default=None,
        check=at_least(1),
        doc="the last step is the one that reaches this number of tokens, counted in full rows",
    )

    def holds(self, step: int, tokens: int) -> bool:
        """Whether a step is in this stage or before; `tokens` are those of all earlier steps."""
        return step <= (self.until_step or 0) or tokens < (self.until_tokens or 0)


def cut(batch: Batch, length: int) -> Batch:
    """
    The same tokens, with a document of its own for every `length` tokens of one.

    No token is lost, and the shapes are the same: attention reaches less far back, and positions start anew.
    """
    positions = batch.positions % length
    return attrs.evolve(batch, positions=positions, document_ids=torch.cumsum(positions == 0, dim=1) - 1)
