"""Windows over documents, compared with a loop over the documents' tokens."""

from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom import Recipe
from drawloom.components.data.packing.windows import Windows, count_windows
from drawloom.components.data.token_arrays import TokenArrays
from drawloom.components.ports.run import RunInfo
from drawloom.graph.testing import fake


@attrs.frozen
class Documents:
    """Documents with these lengths, whose ids count from 1 over all of them."""

    lengths: tuple[int, ...]
    vocab_size: int = 2**15
    eos_id: int = 0

    def documents(self, split: str) -> TokenArrays:
        ends = np.cumsum(self.lengths)
        ids = [np.arange(end - length + 1, end + 1) for end, length in zip(ends, self.lengths, strict=True)]
        return TokenArrays.concatenate(ids, np.uint16)


JOB = fake(RunInfo, name="test", seed=1, folder_path=Path("runs/test"))


def contexts(lengths: tuple[int, ...], length: int, stride: int) -> dict[int, int]:
    """Count the tokens visible before each predicted id, with the loop in transformers' documentation."""
    context_lengths: dict[int, int] = {}
    begin = 1
    for size in lengths:
        done = 0
        for start in range(0, size, stride):
            last = min(start + length, size - 1)
            context_lengths |= {begin + target: target - start for target in range(done + 1, last + 1)}
            done = max(done, last)
            if done == size - 1:
                break
        begin += size
    return context_lengths


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8).map(tuple), st.integers(2, 9), st.data())
def test_each_target_counts_once_with_the_context_of_its_window(
    lengths: tuple[int, ...], length: int, data: st.DataObject
) -> None:
    """In any company, each token but a document's first is predicted once, from as many tokens as alone."""
    stride = data.draw(st.integers(1, length))
    rows = Windows(tokens=Documents(lengths), job=JOB, length=length, stride=stride)
    rows.open()
    batch = rows.batch("train", range(rows.count_rows("train")))
    seen = torch.nonzero(batch.weights).tolist()
    context_lengths = {int(batch.targets[row, column]): int(batch.positions[row, column]) + 1 for row, column in seen}
    assert context_lengths == contexts(lengths, length, stride) and len(context_lengths) == len(seen)
    assert rows.tokens_per_row("train").sum() == batch.token_count
    assert rows.fill_rate("train") == (batch.token_count / batch.tokens.numel() if batch.tokens.numel() else 1)


def test_a_document_of_a_row_and_a_token_has_one_window() -> None:
    """Its last token is only predicted; a token more needs a second window."""
    assert count_windows(np.array([2, 9, 10, 13, 14]), 8, 4).tolist() == [1, 1, 2, 2, 3]


def test_a_row_beyond_the_last_is_an_error() -> None:
    """Negative rows do not count from the end."""
    index = Windows(tokens=Documents(()), job=JOB, length=4).build_row_index(np.array([5]), None)
    for row in (-1, 1):
        with pytest.raises(IndexError, match=f"no row {row} of 1"):
            index.pieces(row)


def test_windows_that_leave_tokens_out_are_refused() -> None:
    """A stride longer than a row is a problem of the recipe."""
    packing = {"use": "data.packing.windows", "length": 16, "stride": 17}
    problems = [str(problem) for problem in Recipe.load("first_run").with_values({"packing": packing}).graph.problems]
    assert any("windows of 16 tokens that move by 17 leave tokens out" in problem for problem in problems)
