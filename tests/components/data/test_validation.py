"""What a run is measured on."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.data.validation import Validation
from drawloom.graph import UserError


@attrs.frozen
class Share:
    """One replica of several."""

    micro_size: int = 2
    dp_size: int = 1
    dp_rank: int = 0


def held_out(rows: Any, rows_used: int = 64, **share: int) -> Validation:
    batching: Any = Share(**share)
    data = Validation(rows=rows, batching=batching, rows_used=rows_used)
    data.open()
    return data


@pytest.fixture(scope="module")
def rows(rows_of: Callable[..., Any]) -> Any:
    return rows_of(held_out=40)


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 5))
def test_every_row_is_measured_once(rows: Any, names: Any, rows_used: int, replicas: int, micro_size: int) -> None:
    """All replicas together see the rows that one alone sees, each once, in microbatches of at most their size."""
    alone = [row for batch in names(list(held_out(rows, rows_used).batches())) for row in batch]
    together = []
    for replica in range(replicas):
        data = held_out(rows, rows_used, micro_size=micro_size, dp_size=replicas, dp_rank=replica)
        batches = names(list(data.batches()))
        assert all(0 < len(batch) <= micro_size for batch in batches)
        together += [row for batch in batches for row in batch]
    assert sorted(together) == alone
    assert len(set(alone)) == min(rows_used, 40)


def test_rows_are_spread_over_the_split(rows: Any, names: Any) -> None:
    """Four of forty rows are every tenth, and not the first four."""
    assert names(list(held_out(rows, 4).batches())) == [[0, 10], [20, 30]]


def test_same_rows_every_time(rows: Any, names: Any) -> None:
    """Measuring again measures the same."""
    data = held_out(rows, 7)
    assert names(list(data.batches())) == names(list(data.batches()))


def test_nothing_held_out_is_an_error(rows_of: Callable[..., Any]) -> None:
    """Without held-out rows there is nothing to measure, and the corpus has to be told so."""
    with pytest.raises(UserError, match="`validation_fraction`"):
        held_out(rows_of(train=3))
