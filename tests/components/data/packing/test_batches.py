"""Rows made of document pieces, compared with a loop over tokens."""

from collections.abc import Sequence

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.data.packing.batches import build_batch
from drawloom.components.data.packing.concatenated import Stream
from drawloom.components.data.token_arrays import TokenArrays
from drawloom.components.ports.data import IGNORE_INDEX, TokenBatch

END = 0
documents = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=12), max_size=8)
lengths = st.integers(2, 9)


@attrs.frozen
class Table:
    """A matrix of rows from documents, all followed by the end."""

    documents: TokenArrays
    index: Stream

    def batch(self, rows: Sequence[int]) -> TokenBatch:
        pieces = [self.index.pieces(row) for row in rows]
        return build_batch(self.documents, pieces, self.index.length, END)


def pack(texts: list[list[int]], length: int, weights: list[list[float]] | None = None) -> Table:
    arrays = [np.array([*text, END]) for text in texts]
    own = None if weights is None else [np.array(document_weights, np.float32) for document_weights in weights]
    token_arrays = TokenArrays.concatenate(arrays, np.uint16, own)
    return Table(token_arrays, Stream(torch.arange(len(texts)), token_arrays.ends, length))


def pack_all(texts: list[list[int]], length: int) -> TokenBatch:
    """All rows of these documents."""
    table = pack(texts, length)
    return table.batch(range(table.index.rows))


def reference(texts: list[list[int]], length: int) -> list[list[tuple[int, int, int, int]]]:
    """Return rows of (token, target, position, document id), token by token."""
    stream = [(token, number) for number, text in enumerate(texts) for token in [*text, END]]
    rows = []
    for start in range(0, max(len(stream) - 1, 0), length):
        row: list[tuple[int, int, int, int]] = []
        first = stream[start][1]
        begun = start
        for position in range(start, start + length):
            token, number = stream[position] if position < len(stream) else (END, len(texts))
            before = stream[position - 1][1] if position <= len(stream) else len(texts)
            if position > start and number != before:
                begun = position
            follows = position + 1 < len(stream) and stream[position + 1][1] == number
            target = stream[position + 1][0] if follows else IGNORE_INDEX
            row.append((token, target, position - begun, number - first))
        rows.append(row)
    return rows


@given(documents, lengths)
def test_rows_equal_those_of_a_loop(texts: list[list[int]], length: int) -> None:
    """Tokens, targets, positions and document ids equal the result of a loop over the tokens."""
    batch = pack_all(texts, length)
    columns = [batch.tokens, batch.targets, batch.positions, batch.document_ids]
    assert all(column.dtype == torch.int64 and column.shape[1] == length for column in columns)
    rows = [list(zip(*(column[row].tolist() for column in columns), strict=True)) for row in range(len(batch.tokens))]
    assert rows == reference(texts, length)


@given(documents, lengths)
def test_each_token_is_a_target_once(texts: list[list[int]], length: int) -> None:
    """Every token but a document's first is a target once, ends included, in order."""
    batch = pack_all(texts, length)
    targets = batch.targets[batch.targets != IGNORE_INDEX].tolist()
    assert targets == [token for text in texts for token in [*text[1:], END]]


@given(documents, lengths)
def test_each_row_has_a_target(texts: list[list[int]], length: int) -> None:
    """Every row has a target, so no microbatch has weight zero."""
    assert (pack_all(texts, length).targets != IGNORE_INDEX).any(dim=1).all()


@given(documents, lengths)
def test_no_target_is_in_another_document(texts: list[list[int]], length: int) -> None:
    """A token's target is the next token of the row, in the same document."""
    batch = pack_all(texts, length)
    learned = batch.targets[:, :-1] != IGNORE_INDEX
    assert (batch.targets[:, :-1] == batch.tokens[:, 1:])[learned].all()
    assert (batch.document_ids[:, :-1] == batch.document_ids[:, 1:])[learned].all()
    assert (batch.positions[:, 1:] == batch.positions[:, :-1] + 1)[learned].all()


@given(documents, lengths, st.data())
def test_rows_have_random_access(texts: list[list[int]], length: int, data: st.DataObject) -> None:
    """A batch with chosen rows equals the rows one by one; a batch without rows is empty."""
    table = pack(texts, length)
    whole, rows = table.batch(range(table.index.rows)), table.index.rows
    chosen = data.draw(st.lists(st.integers(0, rows - 1))) if rows else []
    batch = table.batch(chosen)
    for name in ("tokens", "targets", "positions", "document_ids"):
        assert getattr(batch, name).tolist() == getattr(whole, name)[chosen].tolist()
        assert getattr(batch, name).shape == (len(chosen), length)


def test_a_row_out_of_range_is_an_error() -> None:
    """An index beyond the last row raises."""
    for row in (2, -1):
        with pytest.raises(IndexError):
            pack([[1, 2, 3]], 2).batch([row])


def test_a_batch_owns_its_memory() -> None:
    """Writing to a batch changes neither the dataset nor another batch."""
    table = pack([[1, 2, 3]], 3)
    table.batch([0]).tokens.fill_(9)
    assert table.batch([0]).tokens.tolist() == [[1, 2, 3]]


def test_a_loss_has_the_weight_of_its_target() -> None:
    """A token's loss has its target's weight, also across a cut; a token without a target has weight zero."""
    batch = pack([[1, 2, 3], [4, 5]], 3, [[9.0, 0.0, 0.5, 2.0], [9.0, 1.0, 0.0]]).batch([0, 1])
    assert batch.tokens.tolist() == [[1, 2, 3], [END, 4, 5]]
    assert batch.targets.tolist() == [[2, 3, END], [IGNORE_INDEX, 5, END]]
    assert batch.weights.tolist() == [[0.0, 0.5, 2.0], [0.0, 1.0, 0.0]]
    assert batch.weights.dtype == torch.float32
