"""
Layered layout: boxes in columns, with all arrows leading to the right and few crossings.

After Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical system structures" (1981): the column
of a box is the length of the longest path to it, an arrow over several columns bends in the columns between, and a
column is sorted by the barycenters of its neighbours. Arrows to the same box share their bends and so merge on the way.
Graphviz does not merge arrows, and its output differs between versions; `--format dot` is for Graphviz.
"""

from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import attrs

from drawloom.graph.drawing.diagram import Box, Diagram

SWEEPS = 12
"""Passes that sort columns; later passes rarely remove a crossing."""

MAX_LETTER_WIDTH = 0.64
"""Average width of a letter as a share of its height, in the broadest font that a viewer may substitute."""
BOLD_FACTOR = 1.12

Columns = list[list["ArrowPoint"]]


@attrs.frozen(cache_hash=True)
class ArrowPoint:
    """A point of an arrow: a box at its start or end, or a bend in a column between (Sugiyama's dummy vertex)."""

    box: str
    column: int
    is_bend: bool = False


@attrs.frozen
class Layering:
    """
    Columns from left to right, each from top to bottom. Segments are between points, without duplicates.
    """

    columns: Columns
    segments: tuple[tuple[ArrowPoint, ArrowPoint], ...]
    routes: Mapping[tuple[str, str], tuple[ArrowPoint, ...]]


def arrange_boxes_in_columns(
    names: Sequence[str], arrows: Sequence[tuple[str, str]], sequences: Sequence[Sequence[str]] = ()
) -> Layering:
    """
    Arrange boxes in columns with few crossings. Boxes are in reading order, arrows acyclic; sequences keep their order.
    """
    depth = compute_depths(names, arrows)
    routes = {(source, target): _route_arrow(source, target, depth) for source, target in arrows}
    segments = tuple(dict.fromkeys(segment for route in routes.values() for segment in pairwise(route)))
    points = dict.fromkeys(
        [ArrowPoint(name, depth[name]) for name in names] + [point for segment in segments for point in segment]
    )
    columns: Columns = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for point in points:
        columns[point.column].append(point)
    return Layering(_minimize_crossings(columns, segments, sequences), segments, routes)


def compute_depths(names: Iterable[str], arrows: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Count the arrows on the longest path to every box."""
    depths = dict.fromkeys(names, 0)
    waiting = Counter(target for _, target in arrows)
    leads: dict[str, list[str]] = defaultdict(list)
    for source, target in arrows:
        leads[source].append(target)
    ready = [name for name in depths if not waiting[name]]
    while ready:
        name = ready.pop()
        for target in leads[name]:
            depths[target] = max(depths[target], depths[name] + 1)
            waiting[target] -= 1
            ready += [] if waiting[target] else [target]
    return depths


def _route_arrow(source: str, target: str, depth: Mapping[str, int]) -> tuple[ArrowPoint, ...]:
    bends = [ArrowPoint(target, column, is_bend=True) for column in range(depth[source] + 1, depth[target])]
    return (ArrowPoint(source, depth[source]), *bends, ArrowPoint(target, depth[target]))


def _minimize_crossings(
    columns: Columns, segments: Sequence[tuple[ArrowPoint, ArrowPoint]], sequences: Sequence[Sequence[str]]
) -> Columns:
    """
    Return the order with the fewest crossings among SWEEPS passes, which sort columns by left or right neighbours.
    """
    lefts: dict[ArrowPoint, list[ArrowPoint]] = defaultdict(list)
    rights: dict[ArrowPoint, list[ArrowPoint]] = defaultdict(list)
    for left, right in segments:
        lefts[right].append(left)
        rights[left].append(right)
    columns = [_restore_sequences(column, sequences) for column in columns]
    best, fewest = columns, count_crossings(columns, segments)
    for sweep in range(SWEEPS):
        columns = (
            _sort_by_neighbours(columns, lefts, sequences)
            if sweep % 2 == 0
            else _sort_by_neighbours(columns[::-1], rights, sequences)[::-1]
        )
        if (count := count_crossings(columns, segments)) < fewest:
            best, fewest = columns, count
    return best


def _sort_by_neighbours(
    columns: Columns, toward: Mapping[ArrowPoint, list[ArrowPoint]], sequences: Sequence[Sequence[str]]
) -> Columns:
    swept: Columns = []
    height: dict[ArrowPoint, float] = {}
    for column in columns:
        own_height = {point: (number + 0.5) / len(column) for number, point in enumerate(column)}
        wished_height = {
            point: _mean_or_default([height[other] for other in toward.get(point, ())], own_height[point])
            for point in column
        }
        swept.append(_restore_sequences(sorted(column, key=wished_height.__getitem__), sequences))
        height |= {point: (number + 0.5) / len(column) for number, point in enumerate(swept[-1])}
    return swept


def _restore_sequences(column: list[ArrowPoint], sequences: Sequence[Sequence[str]]) -> list[ArrowPoint]:
    """Sort the members of every sequence within their positions in a column."""
    column = list(column)
    for sequence in sequences:
        rank = {name: number for number, name in enumerate(sequence)}
        slots = [number for number, point in enumerate(column) if point.box in rank and not point.is_bend]
        members = sorted((column[number] for number in slots), key=lambda point: rank[point.box])
        for number, point in zip(slots, members, strict=True):
            column[number] = point
    return column


def _mean_or_default(numbers: Sequence[float], otherwise: float) -> float:
    return sum(numbers) / len(numbers) if numbers else otherwise


def count_crossings(columns: Columns, segments: Iterable[tuple[ArrowPoint, ArrowPoint]]) -> int:
    """Count the crossings between segments."""
    row = {point: number for column in columns for number, point in enumerate(column)}
    gaps: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for left, right in segments:
        gaps[left.column].append((row[left], row[right]))
    return sum(_count_inversions([right for _, right in sorted(gap)]) for gap in gaps.values())


def _count_inversions(numbers: Iterable[int]) -> int:
    seen: list[int] = []
    count = 0
    for number in numbers:  # O(n log n) comparisons; a large graph has thousands of segments in a gap
        count += len(seen) - bisect_right(seen, number)
        insort(seen, number)
    return count


def place_without_overlap(preferred_ys: Sequence[float], heights: Sequence[float]) -> list[float]:
    """
    Return positions nearest to the wishes in least squares, in the same order and without overlap. `heights` are the
    heights.

    The algorithm pools adjacent violators (Ayer and others, 1955).
    """
    offsets = [0.0] if heights else []
    for above, below in pairwise(heights):
        offsets.append(offsets[-1] + (above + below) / 2)
    pools: list[tuple[float, int]] = []
    for wish, offset in zip(preferred_ys, offsets, strict=True):
        total, count = wish - offset, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            above, members = pools.pop()
            total, count = total + above, count + members
        pools.append((total, count))
    starts = [total / count for total, count in pools for _ in range(count)]
    return [start + offset for start, offset in zip(starts, offsets, strict=True)]


NAME, USE = 12.5, 10.0
TITLE, CAPTION = 15.0, 11.0
"""Text sizes in pixels."""
BOX, BETWEEN, BEND = 36.0, 10.0, 14.0
"""Heights of a box, of the gap between two boxes, and of a bend, in pixels."""
GAP, PADDING = 104.0, 10.0
LEFT, TOP, BOTTOM = 20.0, 60.0, 20.0
STRAIGHTENING_SWEEPS = 10


@attrs.frozen
class PlacedDiagram:
    """Coordinates of a layout in pixels: `xs` and `widths` of columns, `ys` of the middles of points."""

    layering: Layering
    xs: Sequence[float]
    widths: Sequence[float]
    ys: Mapping[ArrowPoint, float]
    width: float
    height: float

    def entry_point(self, point: ArrowPoint) -> tuple[float, float]:
        """Return the coordinates where arrows enter a point."""
        return self.xs[point.column], self.ys[point]

    def exit_point(self, point: ArrowPoint) -> tuple[float, float]:
        """Return the coordinates where arrows leave a point."""
        return self.xs[point.column] + self.widths[point.column], self.ys[point]


def place_boxes(diagram: Diagram) -> PlacedDiagram:
    """Compute coordinates for every box and bend, without overlaps and with nearly straight arrows."""
    arrows = [(arrow.source, arrow.target) for arrow in diagram.arrows]
    layering = arrange_boxes_in_columns([box.name for box in diagram.boxes], arrows, diagram.sequences)
    boxes = {box.name: box for box in diagram.boxes}
    widths = [
        max(estimate_box_width(boxes[point.box]) for point in column if not point.is_bend)
        for column in layering.columns
    ]
    xs = [LEFT + sum(widths[:number]) + GAP * number for number in range(len(widths))]
    ys = _compute_ys(layering)
    highest = min((ys[point] - _point_height(point) / 2 for point in ys), default=0.0)
    ys = {point: y - highest + TOP for point, y in ys.items()}
    lowest = max((ys[point] + _point_height(point) / 2 for point in ys), default=TOP)
    titles = max(
        estimate_max_text_width(diagram.title, TITLE, bold=True), estimate_max_text_width(diagram.caption, CAPTION)
    )
    width = max(xs[-1] + widths[-1] if xs else 0.0, LEFT + titles) + LEFT
    return PlacedDiagram(layering, xs, widths, ys, width, lowest + BOTTOM)


def estimate_box_width(box: Box) -> float:
    """Return an upper bound for a box's width in pixels."""
    return max(estimate_max_text_width(box.name, NAME, bold=True), estimate_max_text_width(box.use, USE)) + 2 * PADDING


def _point_height(point: ArrowPoint) -> float:
    return BEND if point.is_bend else BOX + BETWEEN


def _compute_ys(layering: Layering) -> dict[ArrowPoint, float]:
    """
    Return the points' middle heights. Columns move towards the mean of their neighbours, from left to right and back.
    """
    ys: dict[ArrowPoint, float] = {}
    for column in layering.columns:
        ys |= _compute_column_ys(column, [0.0] * len(column))
    neighbours: dict[ArrowPoint, list[ArrowPoint]] = defaultdict(list)
    for left, right in layering.segments:
        neighbours[left].append(right)
        neighbours[right].append(left)
    for sweep in range(STRAIGHTENING_SWEEPS):
        columns: Columns = layering.columns if sweep % 2 == 0 else layering.columns[::-1]
        for column in columns:
            wishes = [_mean_or_default([ys[other] for other in neighbours[point]], ys[point]) for point in column]
            ys |= _compute_column_ys(column, wishes)
    return ys


def _compute_column_ys(column: Sequence[ArrowPoint], preferred_ys: Sequence[float]) -> dict[ArrowPoint, float]:
    return dict(
        zip(column, place_without_overlap(preferred_ys, [_point_height(point) for point in column]), strict=True)
    )


def estimate_max_text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Return an upper bound for a text's width in pixels, in any font."""
    return len(text) * size * MAX_LETTER_WIDTH * (BOLD_FACTOR if bold else 1.0)
