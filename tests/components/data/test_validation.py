"""The validation split."""

import logging
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.data.validation import Validation


@attrs.frozen
class Share:
    """One data-parallel rank of several."""

    micro_size: int = 2
    dp_size: int = 1
    dp_rank: int = 0


def validation(rows: Any, rows_used: int = 64, **share: int) -> Validation:
    batching: Any = Share(**share)
    data = Validation(rows=rows, batching=batching, rows_used=rows_used)
    data.open()
    return data


@pytest.fixture(scope="module")
def rows(rows_of: Callable[..., Any]) -> Any:
    return rows_of(validation=40)


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 5))
def test_every_row_is_evaluated_once(rows: Any, names: Any, rows_used: int, replicas: int, micro_size: int) -> None:
    """
    All ranks together see a single rank's rows once, in microbatches of their size, and count all. They have equally
    many microbatches; the last may have no weight.
    """
    alone = [row for batch in names(list(validation(rows, rows_used).batches())) for row in batch]
    together, counts = [], set()
    for replica in range(replicas):
        data = validation(rows, rows_used, micro_size=micro_size, dp_size=replicas, dp_rank=replica)
        all_batches = list(data.batches())
        counts.add(len(all_batches))
        batches = names([batch for batch in all_batches if batch.weights.any()])
        assert all(0 < len(batch) <= micro_size for batch in batches)
        assert all(batch.token_count == 0 for batch in all_batches[len(batches) :])
        together += [row for batch in batches for row in batch]
    assert sorted(together) == alone and len(counts) == 1
    assert len(set(alone)) == min(rows_used, 40)
    assert data.count_evaluated_and_total_rows() == (len(alone), 40)


def test_rows_are_spread_over_the_split(rows: Any, names: Any) -> None:
    """Four of forty rows are every tenth, and not the first four."""
    assert names(list(validation(rows, 4).batches())) == [[0, 10], [20, 30]]


def test_every_evaluation_has_the_same_rows(rows: Any, names: Any) -> None:
    """A second evaluation has the same rows."""
    data = validation(rows, 7)
    assert names(list(data.batches())) == names(list(data.batches()))


def test_an_empty_validation_split_has_nothing_to_evaluate(
    rows_of: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A corpus without validation documents is no error: there is no batch, and the log says so."""
    caplog.set_level(logging.INFO)
    assert list(validation(rows_of(train=3)).batches()) == []
    assert "the validation split is empty, so there is no evaluation" in caplog.text
