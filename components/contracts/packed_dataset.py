"""What every table of rows does."""

import torch

from drawloom.components.ports.data import IGNORE_INDEX, PackedDataset
from drawloom.graph.testing import expect


def rows_have_one_length(rows: PackedDataset) -> None:
    """A batch has a row for each index, every tensor is int64 of shape (rows, length)."""
    expect(rows.length >= 1 and rows.count("train") >= 1, "there is no row, or no token in a row")
    batch = rows.batch("train", [0, rows.count("train") - 1])
    for name in ("tokens", "targets", "positions", "document_ids"):
        tensor = getattr(batch, name)
        expect(
            tensor.dtype == torch.int64 and tensor.shape == (2, rows.length), f"{name} is {tensor.dtype} {tensor.shape}"
        )


def a_row_is_the_same_whenever_it_is_asked_for(one: PackedDataset, other: PackedDataset) -> None:
    """Rows do not depend on what was asked for before, nor on their neighbours in a batch."""
    last = one.count("train") - 1
    expect(other.count("train") == one.count("train"), "two that are made alike have different numbers of rows")
    together, turned = one.batch("train", [0, last]), other.batch("train", [last, 0])
    for name in ("tokens", "targets", "positions", "document_ids"):
        expect(torch.equal(getattr(together, name), getattr(turned, name).flip(0)), f"{name} depend on the order")


def targets_are_the_next_tokens(rows: PackedDataset) -> None:
    """Where a token's target is the next token of its row, positions go on by one inside a document."""
    batch = rows.batch("train", list(range(min(8, rows.count("train")))))
    inside = batch.document_ids[:, 1:] == batch.document_ids[:, :-1]
    step = batch.positions[:, 1:] - batch.positions[:, :-1]
    expect((step[inside] == 1).all(), "positions do not count on inside a document")
    expect((batch.positions[:, 1:][~inside] == 0).all(), "a document does not begin at position 0")
    learned = inside & (batch.targets[:, :-1] != IGNORE_INDEX)
    expect((batch.targets[:, :-1][learned] == batch.tokens[:, 1:][learned]).all(), "a target is not the next token")
