"""First-fit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.data.packing import first_fit as module
from drawloom.components.data.packing.first_fit import pack_by_first_fit


def reference(sizes: list[int], capacity: int) -> list[list[int]]:
    """Return the rows' items, by a loop over rows."""
    rows: list[list[int]] = []
    left: list[int] = []
    for item, size in enumerate(sizes):
        row = next((row for row, space in enumerate(left) if space >= size), len(rows))
        if row == len(rows):
            rows.append([])
            left.append(capacity)
        rows[row].append(item)
        left[row] -= size
    return rows


def pack_first_fit(sizes: list[int], capacity: int) -> list[list[int]]:
    items, counts = pack_by_first_fit(np.arange(len(sizes)), np.array(sizes, np.int64), capacity)
    return [part.tolist() for part in np.split(items, np.cumsum(counts)[:-1])] if len(counts) else []


@given(st.lists(st.integers(1, 15), max_size=80))
def test_rows_equal_those_of_a_loop(sizes: list[int]) -> None:
    """A document is in the first row with space for it."""
    assert pack_first_fit(sizes, 16) == reference(sizes, 16)


def test_runs_are_packed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long list is packed in runs, several at once and several times, each as if it were alone."""
    monkeypatch.setattr(module, "RUN", 50)
    monkeypatch.setattr(module, "MAX_RUNS", 3)
    sizes = np.random.default_rng(0).integers(1, 16, 420).tolist()
    runs = [reference(sizes[start : start + 50], 16) for start in range(0, 420, 50)]
    assert pack_first_fit(sizes, 16) == [
        [50 * run + item for item in row] for run, rows in enumerate(runs) for row in rows
    ]


def test_as_many_rows_as_documents_are_possible() -> None:
    """Documents too long to fit together get one row apiece."""
    assert pack_first_fit([9] * 300, 16) == [[item] for item in range(300)]
