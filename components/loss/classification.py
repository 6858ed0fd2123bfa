"""Classifier: cross entropy of a document's label, from the hidden state at its last token."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom import NodeView, Problem, UserError, component, setting
from drawloom.components.loss.decoder_inputs import DecoderInputs
from drawloom.components.loss.reward import (
    make_score_head_on_meta,
    mark_last_tokens,
    report_tensor_parallelism,
    warn_unused_head,
)
from drawloom.components.weights.heads import find_score_head_rows
from drawloom.ports import Head, LanguageModel, LossSums, Mesh, TokenBatch


@component
class Classifier(DecoderInputs):
    """
    Classifier: the cross entropy of documents' labels, such as from `data.labelled_texts`.

    The logits are a linear function of the hidden state at a document's last token, in float32. A document's weight is
    its token weights' sum. The named sum `accuracy`, weighted like the loss, counts documents whose label has the
    largest logit.
    """

    batch_leaves: ClassVar[tuple[str, ...]] = (*DecoderInputs.batch_leaves, "labels")

    model: LanguageModel
    mesh: Mesh
    labels: list[str] = setting(
        "names of the classes",
        check=lambda labels: None if len(labels) == len(set(labels)) > 1 else "write two or more different labels",
    )
    head: Path | None = setting(
        "model folder with the initial head, such as a classifier's export, whose classes have the names in "
        "`labels`, in any order; default: random",
        default=None,
    )

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report tensor parallelism, and the model folder's own head."""
        yield from report_tensor_parallelism(node)
        yield from warn_unused_head(node, node.settings["labels"])

    def check_before_open(self) -> None:
        """Raise UserError if the folder `head` has no such head."""
        if self.head is not None:
            find_score_head_rows(self.head, self.labels)

    @cached_property
    def module(self) -> nn.Module | None:
        """The head's parameters, on the meta device until the stages are materialized."""
        return make_score_head_on_meta(self.model, self.labels, self.head)

    @property
    def output_names(self) -> list[str]:
        return self.labels

    def score_tokens(self, hidden: Tensor) -> Tensor:
        assert self.module is not None
        logits: Tensor = self.module(hidden)
        return logits

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
