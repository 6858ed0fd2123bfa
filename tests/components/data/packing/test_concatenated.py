"""Concatenated documents: the index of their stream, compared with a loop."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom import Recipe
from drawloom.components.data.packing.concatenated import Stream


@given(st.lists(st.integers(1, 12), max_size=8), st.integers(2, 9), st.randoms())
def test_pieces_equal_a_cut_stream(sizes: list[int], length: int, shuffling: random.Random) -> None:
    """Pieces list all documents' tokens in order, `length` to a row, row by row."""
    order = shuffling.sample(range(len(sizes)), len(sizes))
    ends = torch.tensor([sizes[number] for number in order], dtype=torch.int64).cumsum(0)
    index = Stream(torch.tensor(order, dtype=torch.int64), ends, length)
    stream = [(number, token) for number in order for token in range(sizes[number])]
    rows = [stream[start : start + length] for start in range(0, max(len(stream) - 1, 0), length)]
    assert index.tokens_per_row().tolist() == [*map(len, rows)]
    assert index.tokens == sum(map(len, rows)) and index.rows == len(rows)
    for number, row in enumerate(rows):
        pieces = index.pieces(number)
        assert [(piece.document, token) for piece in pieces for token in range(piece.first, piece.last)] == row
        assert all(piece.first < piece.last for piece in pieces)


CHATS: dict[str, Any] = {"use": "data.conversations", "paths": ["a.jsonl"]}
TOKENIZER = {"use": "data.hugging_face_tokenizer", "path": "tokenizer"}
WARNING = "a row's end cuts conversations of [%s], and an answer is trained without its question; write use = \"data."


@pytest.mark.parametrize(
    ("tokens", "named"),
    [(CHATS, "tokens"), ({"use": "data.mixture", "sources": {"a": CHATS}}, "tokens.sources.a")],
)
@pytest.mark.parametrize("use", ["concatenated", "best_fit"])
def test_conversations_are_cut_with_a_warning(tokens: dict[str, Any], named: str, use: str) -> None:
    """`check` warns if a packing cuts conversations, in a mixture too, and about no other packing."""
    packing = {"use": f"data.packing.{use}", "length": 16}
    tables: dict[str, Any] = {"tokenizer": TOKENIZER, "tokens": tokens, "packing": packing}
    problems = map(str, Recipe.load("first_run").with_values(tables).graph.problems)
    assert any(WARNING % named in problem for problem in problems) is (use == "concatenated")


def test_a_row_beyond_the_last_is_an_error() -> None:
    """Negative rows do not count from the end."""
    index = Stream(torch.tensor([0]), torch.tensor([5]), 4)
    for row in (-1, 1 + index.rows):
        with pytest.raises(IndexError, match=f"no row {row}"):
            index.pieces(row)
