"""The row stream: shares of sources, resumed with other ones."""

from collections import Counter
from fractions import Fraction
from heapq import merge
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.data.order.permutation import Permutation
from drawloom.components.data.order.sequential import Sequential
from drawloom.components.data.order.shuffled import Shuffled
from drawloom.components.data.order.stream import UNIT, RowStream, Segment, convert_token_weights_to_shares
from drawloom.components.ports.data import RowSource
from drawloom.graph import UserError

shares = st.lists(st.integers(1, UNIT), min_size=1, max_size=5)


def sources_of(*counts: int) -> dict[str, RowSource]:
    """Sources a, b and c with the given numbers of rows."""
    starts = np.cumsum([0, *counts]).tolist()
    names = "abcdefg"[: len(counts)]
    return {name: RowSource(name, starts[i], counts[i], 8 * counts[i], 1.0) for i, name in enumerate(names)}


def plain_turns(shares: list[int], count: int) -> list[tuple[int, int]]:
    """Yield the source and its row at each position, merged by exact fractions."""

    def due(source: int) -> Any:
        row = 0
        while True:
            yield Fraction(2 * row + 1, 2 * shares[source]), source, row
            row += 1

    return [(source, row) for _, source, row in islice(merge(*map(due, range(len(shares)))), count)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 150), st.integers(1, 150))
def test_sources_take_turns_by_their_shares(shares: list[int], first: int, count: int) -> None:
    """Any range of positions equals a merge by exact fractions, and so does the count before it."""
    segment = Segment(0, {str(number): share for number, share in enumerate(shares)})
    wanted = plain_turns(shares, first + count)
    source, row = segment.locate_sources_and_rows(first, first + count)
    assert list(zip(source.tolist(), row.tolist(), strict=True)) == wanted[first:]
    counted = Counter(source for source, _ in wanted[:first])
    assert segment.count_segment_rows_before(first) == {str(number): counted[number] for number in range(len(shares))}


@given(shares, st.integers(0, 10**12))
def test_a_share_holds_at_every_position(shares: list[int], position: int) -> None:
    """In a run of any length a source's share is exact to half a row per source, and the counts add up."""
    counts = Segment(0, {str(number): share for number, share in enumerate(shares)}).count_segment_rows_before(position)
    assert sum(counts.values()) == position
    for share, count in zip(shares, counts.values(), strict=True):
        assert abs(count - position * Fraction(share, sum(shares))) <= len(shares) / 2 + 0.01


@given(st.integers(0, 2**70), st.integers(1, 20), st.lists(st.integers(0, 200), max_size=20), st.booleans())
def test_the_row_depends_only_on_the_position(seed: int, count: int, places: list[int], shuffle: bool) -> None:
    """A position gives the same row after any earlier requests, and each epoch is a permutation."""

    def stream() -> RowStream:
        job: Any = type("Job", (), {"seed": seed})
        order = Shuffled(job=job) if shuffle else Sequential()
        return RowStream({"": RowSource("", 0, count, count, 1.0)}, order, [Segment(0, {"": UNIT})])

    whole = stream().rows_at(range(201))
    assert stream().rows_at(places) == [whole[position] for position in places]
    for start in range(0, 201 - count, count):
        epoch = whole[start : start + count]
        assert sorted(epoch) == list(range(count))
        expected = (
            Permutation(seed, "rows", start // count, count).permute_all().tolist() if shuffle else list(range(count))
        )
        assert epoch == expected


def test_weights_are_shares_of_tokens() -> None:
    """
    A source with quarter-full rows contributes four times as many rows; without weight it contributes none.
    """
    full, quarter = RowSource("full", 0, 10, 160, 3.0), RowSource("quarter", 10, 20, 80, 3.0)
    left_out = [RowSource("left_out", 30, 5, 80, 0.0), RowSource("empty", 35, 0, 0, 0.0)]
    shares = convert_token_weights_to_shares([full, quarter, *left_out])
    assert shares.keys() == {"full", "quarter"}
    assert shares["quarter"] / shares["full"] == pytest.approx(4)


def test_a_source_with_a_weight_but_without_rows_is_refused() -> None:
    """The other sources do not get the share of a source whose files are empty."""
    sources = [RowSource("full", 0, 10, 160, 1.0), RowSource("empty", 10, 0, 0, 1.0)]
    with pytest.raises(UserError, match="rows: the source empty has no training text"):
        convert_token_weights_to_shares(sources)


def test_other_shares_continue_each_source() -> None:
    """After a change in shares, and with a new source, each source continues with its next row."""
    segments = [Segment(0, {"a": 1, "b": 1}), Segment(9, {"a": 1, "b": 2, "c": 1}), Segment(21, {"c": 1, "a": 1})]
    stream = RowStream(sources_of(50, 60, 70), Sequential(), segments)
    rows = stream.rows_at(range(31))
    for name, first, last in (("a", 0, 50), ("b", 50, 110), ("c", 110, 180)):
        own = [row - first for row in rows if first <= row < last]
        assert own == list(range(len(own)))
        assert stream.count_rows_before(31)[name] == len(own)
    counts = [Counter(np.searchsorted([50, 110], part, side="right").tolist()) for part in (rows[9:21], rows[21:])]
    assert counts == [{0: 3, 1: 6, 2: 3}, {0: 5, 2: 5}]
    assert stream.count_rows_before(9) == {"a": 5, "b": 4}


def test_rows_of_a_source_that_is_gone_are_refused() -> None:
    """Rows of the remaining source, before and after, are available; a removed source's row is refused."""
    stream = RowStream(sources_of(50), Sequential(), [Segment(0, {"a": 1, "gone": 1}), Segment(4, {"a": 1})])
    assert stream.rows_at([0, 2, 4, 5, 6]) == [0, 1, 2, 3, 4]
    with pytest.raises(UserError, match="position 1 is from a source no longer in the mixture"):
        stream.rows_at([1])
