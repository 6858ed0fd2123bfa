"""Properties of a token batch."""

import pytest
import torch
from torch import Tensor

from drawloom.components.ports.data import IGNORE_INDEX, TokenBatch, require_token_batch
from drawloom.components.state.batch import Batch, leaf
from drawloom.graph import UserError


class Images(Batch):
    """A batch without tokens."""

    pixels: Tensor = leaf("rows")
    weights: Tensor = leaf("rows")


@pytest.mark.parametrize(
    ("ids", "whole"), [([[0, 0, 0], [4, 4, 4]], True), ([[0, 0, 0], [0, 0, 1]], False), ([[1], [2]], True)]
)
def test_whole_rows_are_of_one_document(ids: list[list[int]], whole: bool) -> None:
    """A batch has whole rows if no row has two numbers of documents; where the host can't look, it has none."""
    documents = torch.tensor(ids)
    batch = TokenBatch(documents, documents, documents, documents, documents.float())
    assert batch.has_one_document_per_row() is whole
    there = documents.to("meta")
    assert not TokenBatch(there, there, there, there, there).has_one_document_per_row()


def test_a_batch_without_weights_has_neither_targets_nor_tokens() -> None:
    """A rank without rows in an evaluation adds nothing to loss, weight and token count."""
    ids = torch.ones(2, 3, dtype=torch.int64)
    idle = TokenBatch(ids, ids, ids, ids, ids.float()).with_zero_weights()
    assert not idle.weights.any() and (idle.targets == IGNORE_INDEX).all() and idle.token_count == 0
    assert torch.equal(idle.tokens, ids)


def test_a_batch_of_another_class_is_refused_by_name() -> None:
    """The message names the reader, and the class of the batch with its leaves."""
    batch = Images(pixels=torch.zeros(2, 4), weights=torch.ones(2))
    with pytest.raises(UserError, match=r"bits reads rows of tokens, and .* batches are Images: pixels, weights"):
        require_token_batch(batch, "bits")
