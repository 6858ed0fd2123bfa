"""Rows whose tokens identify them."""

from collections.abc import Callable
from typing import Any

import pytest

from drawloom.components.data.packing.concatenated import Concatenated
from drawloom.components.ports.data import TokenBatch
from support.tokens_in_memory import TokensInMemory

LENGTH = 4


@pytest.fixture(scope="session")
def rows_of(job: Any) -> Callable[..., Concatenated]:
    """Make a dataset with this many rows; row r has the tokens 4r + 1, 4r + 2, 4r + 3, 4r + 4."""

    def make(train: int = 0, validation: int = 0) -> Concatenated:
        splits = [[[*range(1, count * LENGTH + 1), 0]] if count else [] for count in (train, validation)]
        rows = Concatenated(tokens=TokensInMemory(splits[0], splits[1]), job=job, length=LENGTH)
        rows.open()
        return rows

    return make


@pytest.fixture(scope="session")
def names() -> Callable[[list[TokenBatch]], list[list[int]]]:
    """Return the row numbers in these batches."""
    return lambda batches: [((batch.tokens[:, 0] - 1) // LENGTH).tolist() for batch in batches]
