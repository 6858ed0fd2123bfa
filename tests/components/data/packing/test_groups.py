"""Rows of whole documents: properties common to all groupings."""

import pickle
from collections import Counter
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.data.packing import groups
from drawloom.components.data.packing.best_fit import pack_by_best_fit
from drawloom.components.data.packing.first_fit import pack_by_first_fit
from drawloom.components.data.packing.groups import (
    Groups,
    PackFunction,
    RowAssignment,
    build_rows_from_documents,
    group_items_by_row,
    split_into_blocks,
)
from drawloom.components.data.packing.padded import assign_one_row_per_document

GROUPINGS = [pack_by_best_fit, pack_by_first_fit, assign_one_row_per_document]


@pytest.mark.parametrize("group", GROUPINGS)
@given(sizes=st.lists(st.integers(2, 40), max_size=60), length=st.integers(2, 16), seed=st.integers(0, 99))
def test_each_token_is_in_one_row(group: PackFunction, sizes: list[int], length: int, seed: int) -> None:
    """No row is overfull or empty, and all chosen documents' tokens are in one row, but single tokens at a cut."""
    chosen = np.random.default_rng(seed).permutation(len(sizes))[: len(sizes) * 3 // 4]
    index = build_rows_from_documents(np.array(sizes, np.int64), [chosen], length, group)
    rows = [index.pieces(row) for row in range(index.rows)]
    assert index.tokens_per_row().tolist() == [sum(piece.last - piece.first for piece in row) for row in rows]
    filled = [sum(piece.last - piece.first for piece in row) for row in rows]
    assert all(0 < size <= length for size in filled) and sum(filled) == index.tokens
    token_counts = Counter(
        (part.document, token) for row in rows for part in row for token in range(part.first, part.last)
    )
    cut = {document for document in chosen.tolist() if sizes[document] % length == 1}
    wanted = {(number, token) for number in chosen.tolist() for token in range(sizes[number] - (number in cut))}
    assert token_counts == Counter(wanted)


def test_blocks_have_the_same_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouping in several blocks and in one block gives the same documents."""
    sizes = np.random.default_rng(0).integers(2, 90, 200)

    def documents() -> Counter[int]:
        index = build_rows_from_documents(sizes, split_into_blocks(np.arange(200)), 32, pack_by_best_fit)
        return Counter(piece.document for row in range(index.rows) for piece in index.pieces(row))

    whole = documents()
    monkeypatch.setattr(groups, "BLOCK", 7)
    assert documents() == whole


def test_an_index_is_sent_to_workers() -> None:
    """A pickled index has the same rows; a row beyond the last is an error."""
    index = build_rows_from_documents(np.array([3, 9, 2]), [np.arange(3)], 4, pack_by_best_fit)
    copy: Groups = pickle.loads(ForkingPickler.dumps(index))
    assert [copy.pieces(row) for row in range(copy.rows)] == [index.pieces(row) for row in range(index.rows)]
    for row in (-1, index.rows):
        with pytest.raises(IndexError, match=f"no row {row}"):
            index.pieces(row)


@pytest.mark.parametrize("group", GROUPINGS)
def test_short_documents_fit_into_long_rows(group: PackFunction) -> None:
    """Lengths of one byte are packed into rows whose length takes more."""
    index = build_rows_from_documents(np.array([3, 9, 2]), [np.arange(3)], 100_000, group)
    assert sorted(piece for row in range(index.rows) for piece in index.pieces(row)) == [
        (0, 0, 3),
        (1, 0, 9),
        (2, 0, 2),
    ]


@pytest.mark.parametrize("group", GROUPINGS)
@pytest.mark.parametrize("most", [2**7, 2**15])
def test_powers_of_two_lose_no_token(group: PackFunction, most: int) -> None:
    """No token is lost if the row length or a document just exceeds a signed integer of one or two bytes."""
    for sizes, length in (([3, 9, 2], most), ([most, 9, 5], most // 4)):
        index = build_rows_from_documents(np.array(sizes, np.int64), [np.arange(3)], length, group)
        assert index.tokens == index.tokens_per_row().sum() == sum(sizes)


def test_no_documents_make_no_rows() -> None:
    """A split may be empty."""
    for group in GROUPINGS:
        assert build_rows_from_documents(np.empty(0, np.int64), [np.empty(0, np.int64)], 8, group).rows == 0


@given(st.lists(st.integers(0, 5), max_size=30))
def test_items_are_gathered_by_row(rows: list[int]) -> None:
    """Items come row by row, in their places there."""
    places = [rows[:number].count(row) for number, row in enumerate(rows)]
    items, counts = group_items_by_row(
        np.arange(len(rows)), RowAssignment(np.array(rows, np.int64), np.array(places, np.int64), 6)
    )
    assert items.tolist() == sorted(range(len(rows)), key=lambda number: (rows[number], number))
    assert counts.tolist() == [rows.count(row) for row in range(6)]
