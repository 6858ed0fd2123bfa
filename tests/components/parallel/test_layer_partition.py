"""Partition of layers over stages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.parallel.layer_partition import partition_layers, split_off_embedding_and_head


def sizes(*arguments: int) -> list[int]:
    """Return the stages' layer counts."""
    return [span.last - span.first for span in partition_layers(*arguments)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((16, 8, 0, 1), [3, 2, 2, 2, 2, 2, 2, 1]),
        ((8, 4, 2, 2), [1, 3, 3, 1]),
        ((28, 4, 1, 1), [7, 8, 7, 6]),
        ((16, 5, 0, 0), [4, 3, 3, 3, 3]),
        ((28, 4, 0, 20), [9, 9, 9, 1]),  # a head that outweighs a fair share leaves its stage one layer
    ],
)
def test_splits_by_hand(arguments: tuple[int, ...], expected: list[int]) -> None:
    """Embedding and head count as many layers as they cost."""
    assert sizes(*arguments) == expected


@given(layers=st.integers(1, 100), stages=st.integers(1, 20))
def test_every_layer_is_in_one_stage(layers: int, stages: int) -> None:
    """Spans join without gap or overlap, ends belong to the first and last, and no stage is empty."""
    if layers < stages:
        with pytest.raises(ValueError, match="without a layer"):
            partition_layers(layers, stages)
        return
    spans = partition_layers(layers, stages)
    assert [layer for span in spans for layer in range(span.first, span.last)] == list(range(layers))
    assert [span.embedding for span in spans] == [True] + [False] * (stages - 1)
    assert [span.head for span in spans] == [False] * (stages - 1) + [True]


def test_ends_apart_leave_the_layers_as_they_are() -> None:
    """Embedding and head are spans without layers, before and after all others, which have neither."""
    spans = split_off_embedding_and_head(partition_layers(7, 3), 7)
    assert [(span.first, span.last) for span in spans] == [(0, 0), (0, 3), (3, 5), (5, 7), (7, 7)]
    assert [span.embedding for span in spans] == [True, False, False, False, False]
    assert [span.head for span in spans] == [False, False, False, False, True]


def test_layers_outside_of_stages_are_in_the_span_of_the_head() -> None:
    """If stages have seven of nine layers, the head's span has the last two."""
    spans = split_off_embedding_and_head(partition_layers(7, 3), 9)
    assert [(span.first, span.last) for span in spans] == [(0, 0), (0, 3), (3, 5), (5, 7), (7, 9)]
    assert [span.head for span in spans] == [False, False, False, False, True]
