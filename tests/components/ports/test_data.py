"""What a batch knows of itself."""

import attrs
import pytest
import torch
from torch import Tensor

from drawloom.components.ports.data import Batch
from drawloom.graph import UserError


@attrs.frozen
class Rewarded(Batch):
    """A batch with a number of each row."""

    reward: Tensor = attrs.field(kw_only=True)


@attrs.frozen
class Renamed(Batch):
    """A batch with a method of its own."""


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


def test_a_subclass_of_batch_is_refused_with_its_fields() -> None:
    """Batches are made anew of their tensors on the way to a loss, so that what a subclass adds would be lost there."""
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(UserError, match=r"^Rewarded is a subclass of Batch with 'reward', of which a run takes only"):
        Rewarded(ids, ids, ids, ids, ids.float(), reward=torch.ones(2))
    with pytest.raises(UserError, match=r"^Renamed is a subclass of Batch, of which .*; make a Batch"):
        Renamed(ids, ids, ids, ids, ids.float())
