"""Rows whose tokens identify them."""

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import pytest

from drawloom.components.data.packing import Packing
from drawloom.components.ports.data import Batch, Split

LENGTH = 4


@attrs.frozen
class Counting:
    """A corpus of one document per split that counts from 1, and a tokenizer of numbers whose end is 0."""

    train: int
    validation: int
    vocab_size: int = 100_000
    eos_id: int = 0

    def documents(self, split: Split) -> Iterator[str]:
        last = self.train if split == "train" else self.validation
        yield " ".join(str(number) for number in range(1, last + 1))

    def encode(self, text: str) -> np.ndarray:
        return np.array([int(word) for word in text.split()], np.int32)


@pytest.fixture(scope="session")
def rows_of(job: Any) -> Callable[..., Packing]:
    """Makes a dataset of this many rows; the tokens of row r are 4r + 1, 4r + 2, 4r + 3, 4r + 4."""

    def make(train: int = 0, validation: int = 0) -> Packing:
        numbers: Any = Counting(train * LENGTH, validation * LENGTH)
        rows = Packing(corpus=numbers, tokenizer=numbers, job=job, length=LENGTH)
        rows.open()
        return rows

    return make


@pytest.fixture(scope="session")
def names() -> Callable[[list[Batch]], list[list[int]]]:
    """The row numbers in these batches."""
    return lambda batches: [((batch.tokens[:, 0] - 1) // LENGTH).tolist() for batch in batches]
