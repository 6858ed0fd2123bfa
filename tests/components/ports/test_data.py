"""What a batch knows of itself."""

import pytest
import torch

from drawloom.components.ports.data import Batch


@pytest.mark.parametrize(
    ("ids", "whole"), [([[0, 0, 0], [4, 4, 4]], True), ([[0, 0, 0], [0, 0, 1]], False), ([[1], [2]], True)]
)
def test_whole_rows_are_of_one_document(ids: list[list[int]], whole: bool) -> None:
    """A batch has whole rows if no row has two numbers of documents; where the host can't look, it has none."""
    documents = torch.tensor(ids)
    batch = Batch(documents, documents, documents, documents, documents.float())
    assert batch.has_whole_rows() is whole
    there = documents.to("meta")
    assert not Batch(there, there, there, there, there).has_whole_rows()
