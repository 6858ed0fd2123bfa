"""Layout of boxes in columns."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from drawloom.graph.drawing.layout import (
    arrange_boxes_in_columns,
    compute_depths,
    count_crossings,
    place_without_overlap,
)

NAMES = [f"n{number}" for number in range(9)]
PAIRS = st.lists(st.sampled_from(list(combinations(NAMES, 2))), unique=True, max_size=20)


@given(PAIRS)
def test_every_arrow_leads_to_the_right_by_steps_of_a_column(arrows: list[tuple[str, str]]) -> None:
    """A path has its boxes at both ends and one stop per column between; a stop is in one column."""
    layering = arrange_boxes_in_columns(NAMES, arrows)
    for (source, target), route in layering.routes.items():
        assert route[0].box == source and route[-1].box == target and not route[0].is_bend and not route[-1].is_bend
        assert [point.column for point in route] == list(range(route[0].column, route[-1].column + 1))
    points = [point for column in layering.columns for point in column]
    assert len(points) == len(set(points))
    assert sorted(point.box for point in points if not point.is_bend) == NAMES


@given(PAIRS)
def test_the_column_of_a_box_is_its_longest_path(arrows: list[tuple[str, str]]) -> None:
    """A box's column is one more than the greatest column of its users, or 0."""
    depths = compute_depths(NAMES, arrows)
    for name in NAMES:
        users = [depths[source] for source, target in arrows if target == name]
        assert depths[name] == max(users, default=-1) + 1


@given(PAIRS)
def test_crossings_are_counted_as_pairs_in_opposite_order(arrows: list[tuple[str, str]]) -> None:
    """Two pieces in a gap cross if their ends are in the opposite order of their starts."""
    layering = arrange_boxes_in_columns(NAMES, arrows)
    index = {point: number for column in layering.columns for number, point in enumerate(column)}
    by_hand = sum(
        one[0].column == other[0].column and (index[one[0]] - index[other[0]]) * (index[one[1]] - index[other[1]]) < 0
        for one, other in combinations(layering.segments, 2)
    )
    assert count_crossings(layering.columns, layering.segments) == by_hand


def test_arrows_that_need_not_cross_do_not() -> None:
    """Three pairs in the wrong order are reordered without crossings."""
    names = ["root", "a", "b", "c", "z", "y", "x"]
    arrows = [("root", "a"), ("root", "b"), ("root", "c"), ("c", "z"), ("b", "y"), ("a", "x")]
    layering = arrange_boxes_in_columns(names, arrows)
    assert count_crossings(layering.columns, layering.segments) == 0


def test_a_sequence_keeps_its_order_though_arrows_cross() -> None:
    """A sequence's members keep their order from top to bottom."""
    arrows = [("root", "a"), ("root", "b"), ("root", "c"), ("c", "z"), ("z", "y"), ("b", "y"), ("a", "x")]
    layering = arrange_boxes_in_columns(["root", "c", "b", "a", "x", "y", "z"], arrows, [("b", "c", "a")])
    column = [point.box for point in layering.columns[1] if not point.is_bend]
    assert column == ["b", "c", "a"]


@given(st.lists(st.tuples(st.floats(-99, 99), st.floats(1, 50)), max_size=12))
def test_spread_boxes_do_not_overlap_and_stay_at_their_wishes_if_free(both: list[tuple[float, float]]) -> None:
    """Neighbours are at least half of both sizes apart, and wishes that are far enough apart are kept."""
    preferred_ys, heights = [wish for wish, _ in both], [room for _, room in both]
    positions = place_without_overlap(preferred_ys, heights)
    gaps = [(positions[i + 1] - positions[i], (heights[i] + heights[i + 1]) / 2) for i in range(len(both) - 1)]
    assert all(gap >= least - 1e-6 for gap, least in gaps)
    wide = [60.0 * number for number in range(len(heights))]
    assert all(abs(one - other) < 1e-6 for one, other in zip(place_without_overlap(wide, heights), wide, strict=True))


def test_boxes_that_collide_move_by_the_same_amount() -> None:
    """Two boxes with the same wish are placed on either side of it."""
    assert place_without_overlap([10.0, 10.0, 90.0], [20.0, 20.0, 20.0]) == [0.0, 20.0, 90.0]
