"""Classifier: cross entropy of a document's label, from the hidden state at its last token."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom import UserError, component, setting
from drawloom.components.loss.decoder_inputs import DecoderInputs
from drawloom.components.loss.reward import ScoringLoss, mark_last_tokens
from drawloom.ports import Head, LossSums, TokenBatch


@component
class Classifier(ScoringLoss, DecoderInputs):
    """
    Classifier: the cross entropy of documents' labels, such as from `data.labelled_texts`.

    The logits are a linear function of the hidden state at a document's last token, in float32. A document's weight is
    its token weights' sum. The named sum `accuracy`, weighted like the loss, counts documents whose label has the
    largest logit.
    """

    batch_leaves: ClassVar[tuple[str, ...]] = (*DecoderInputs.batch_leaves, "labels")

    labels: list[str] = setting(
        "names of the classes",
        check=lambda labels: None if len(labels) == len(set(labels)) > 1 else "write two or more different labels",
    )

    @property
    def output_names(self) -> list[str]:  # type: ignore[override]
        return self.labels

    def loss(self, hidden: Tensor, head: Head, batch: TokenBatch) -> LossSums:
        """
        Return the sum of losses, the sum of weights, and named sums; hidden is (rows, length, hidden_size).

        Raises UserError for data without labels.
        """
        if batch.labels is None:
            raise UserError("loss.classification needs a label for every document; use data.labelled_texts", 2)
        documents = batch.document_ids
        weights = sum_by_document_at_every_token(batch.weights, documents) * mark_last_tokens(documents)
        labels = sum_by_document_at_every_token(batch.labels, documents).long()
        logits = self.score_tokens(hidden)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(weights)
        with torch.no_grad():
            accuracy = ((logits.argmax(-1) == labels) * weights).sum()
        # Not a product with 0: a token without weight may have a loss that is not finite.
        return torch.where(weights > 0, losses * weights, 0.0).sum(), weights.sum(), {"accuracy": accuracy}


def sum_by_document_at_every_token(values: Tensor, documents: Tensor) -> Tensor:
    """
    Return the sum over a token's document, at every token: (rows, length).

    values: (rows, length); documents: document ids from 0 in every row, int64 (rows, length).
    """
    return torch.zeros_like(values).scatter_add_(1, documents, values).gather(1, documents)
