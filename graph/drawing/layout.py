"""
Layered layout: boxes in columns, so that every arrow leads to the right and few arrows cross.

After Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical system structures" (1981): a box's
column is the length of the longest path to it, an arrow over several columns bends in those between, and each column is
sorted by the barycenter of its neighbours. Arrows to the same box share their bends, so that they merge on the way.
Graphviz does not merge them, and its output differs between versions; for it there is `--format dot`.
"""

from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import attrs

from drawloom.graph.drawing.diagram import Box, Diagram

SWEEPS = 12
"""Passes of sorting columns; later ones rarely remove a crossing."""

BROADEST = 0.64
"""Average width of a letter as a share of its height, in the broadest font that a viewer may substitute."""
BOLD = 1.12

Columns = list[list["ArrowPoint"]]


@attrs.frozen
class ArrowPoint:
    """A point of an arrow: a box at its start or end, or a bend in a column between (Sugiyama's dummy vertex)."""

    box: str
    column: int
    bend: bool = False


@attrs.frozen
class Layering:
    """Columns from left to right, each from top to bottom; `pieces` are the segments between stops, each once."""

    columns: Columns
    pieces: tuple[tuple[ArrowPoint, ArrowPoint], ...]
    ways: Mapping[tuple[str, str], tuple[ArrowPoint, ...]]

    @property
    def neighbours(self) -> dict[ArrowPoint, list[ArrowPoint]]:
        """The stops on both sides of each."""
        found: dict[ArrowPoint, list[ArrowPoint]] = defaultdict(list)
        for left, right in self.pieces:
            found[left].append(right)
            found[right].append(left)
        return found


def layer(names: Sequence[str], arrows: Sequence[tuple[str, str]], sequences: Sequence[Sequence[str]] = ()) -> Layering:
    """Columns with few crossings, of boxes in reading order and acyclic arrows; sequences keep their order."""
    depth = depths(names, arrows)
    ways = {(source, target): _way(source, target, depth) for source, target in arrows}
    pieces = tuple(dict.fromkeys(piece for way in ways.values() for piece in pairwise(way)))
    stops = dict.fromkeys(
        [ArrowPoint(name, depth[name]) for name in names] + [stop for piece in pieces for stop in piece]
    )
    columns: Columns = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for stop in stops:
        columns[stop.column].append(stop)
    return Layering(_fewest_crossings(columns, pieces, sequences), pieces, ways)


def depths(names: Iterable[str], arrows: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The number of arrows on the longest path to each box."""
    found = dict.fromkeys(names, 0)
    waiting = Counter(target for _, target in arrows)
    leads: dict[str, list[str]] = defaultdict(list)
    for source, target in arrows:
        leads[source].append(target)
    ready = [name for name in found if not waiting[name]]
    while ready:
        name = ready.pop()
        for target in leads[name]:
            found[target] = max(found[target], found[name] + 1)
            waiting[target] -= 1
            ready += [] if waiting[target] else [target]
    return found


def _way(source: str, target: str, depth: Mapping[str, int]) -> tuple[ArrowPoint, ...]:
    bends = [ArrowPoint(target, column, bend=True) for column in range(depth[source] + 1, depth[target])]
    return (ArrowPoint(source, depth[source]), *bends, ArrowPoint(target, depth[target]))


def _fewest_crossings(
    columns: Columns, pieces: Sequence[tuple[ArrowPoint, ArrowPoint]], sequences: Sequence[Sequence[str]]
) -> Columns:
    """The order with the fewest crossings of SWEEPS passes, which sort columns by their left or right neighbours."""
    lefts: dict[ArrowPoint, list[ArrowPoint]] = defaultdict(list)
    rights: dict[ArrowPoint, list[ArrowPoint]] = defaultdict(list)
    for left, right in pieces:
        lefts[right].append(left)
        rights[left].append(right)
    columns = [_in_order(column, sequences) for column in columns]
    best, least = columns, crossings(columns, pieces)
    for sweep in range(SWEEPS):
        columns = (
            _sweep(columns, lefts, sequences) if sweep % 2 == 0 else _sweep(columns[::-1], rights, sequences)[::-1]
        )
        if (now := crossings(columns, pieces)) < least:
            best, least = columns, now
    return best


def _sweep(
    columns: Columns, toward: Mapping[ArrowPoint, list[ArrowPoint]], sequences: Sequence[Sequence[str]]
) -> Columns:
    swept: Columns = []
    place: dict[ArrowPoint, float] = {}
    for column in columns:
        own = {stop: (number + 0.5) / len(column) for number, stop in enumerate(column)}
        wish = {stop: _mean([place[other] for other in toward.get(stop, ())], own[stop]) for stop in column}
        swept.append(_in_order(sorted(column, key=wish.__getitem__), sequences))
        place |= {stop: (number + 0.5) / len(column) for number, stop in enumerate(swept[-1])}
    return swept


def _in_order(column: list[ArrowPoint], sequences: Sequence[Sequence[str]]) -> list[ArrowPoint]:
    """A column whose members of a sequence are in its order, at the positions that they had together."""
    column = list(column)
    for sequence in sequences:
        rank = {name: number for number, name in enumerate(sequence)}
        places = [number for number, stop in enumerate(column) if stop.box in rank and not stop.bend]
        members = sorted((column[number] for number in places), key=lambda stop: rank[stop.box])
        for number, stop in zip(places, members, strict=True):
            column[number] = stop
    return column


def _mean(numbers: Sequence[float], otherwise: float) -> float:
    return sum(numbers) / len(numbers) if numbers else otherwise


def crossings(columns: Columns, pieces: Iterable[tuple[ArrowPoint, ArrowPoint]]) -> int:
    """How many pairs of pieces cross."""
    place = {stop: number for column in columns for number, stop in enumerate(column)}
    gaps: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for left, right in pieces:
        gaps[left.column].append((place[left], place[right]))
    return sum(_inversions([right for _, right in sorted(gap)]) for gap in gaps.values())


def _inversions(numbers: Iterable[int]) -> int:
    seen: list[int] = []
    count = 0
    for number in numbers:  # O(n log n) comparisons; a large graph has thousands of segments in a gap
        count += len(seen) - bisect_right(seen, number)
        insort(seen, number)
    return count


def spread(wishes: Sequence[float], rooms: Sequence[float]) -> list[float]:
    """
    Positions nearest to the wishes in least squares, in this order and without overlap; `rooms` are the heights.

    By pooling adjacent violators (Ayer and others, 1955).
    """
    offsets = [0.0] if rooms else []
    for above, below in pairwise(rooms):
        offsets.append(offsets[-1] + (above + below) / 2)
    pools: list[tuple[float, int]] = []
    for wish, offset in zip(wishes, offsets, strict=True):
        total, count = wish - offset, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            above, members = pools.pop()
            total, count = total + above, count + members
        pools.append((total, count))
    starts = [total / count for total, count in pools for _ in range(count)]
    return [start + offset for start, offset in zip(starts, offsets, strict=True)]


NAME, USE = 12.5, 10.0
TITLE, CAPTION = 15.0, 11.0
"""Sizes of text, in pixels."""
BOX, BETWEEN, BEND = 36.0, 10.0, 14.0
"""Heights in pixels: of a box, of the gap between two boxes, of a bend."""
GAP, PADDING = 104.0, 10.0
LEFT, TOP, BOTTOM = 20.0, 60.0, 20.0
STRAIGHTENING_SWEEPS = 10


@attrs.frozen
class Placed:
    """The coordinates of a layout in pixels: `xs` and `widths` of columns, `ys` of the middles of stops."""

    layering: Layering
    xs: Sequence[float]
    widths: Sequence[float]
    ys: Mapping[ArrowPoint, float]
    width: float
    height: float

    def left(self, stop: ArrowPoint) -> tuple[float, float]:
        """The point at which arrows enter a stop."""
        return self.xs[stop.column], self.ys[stop]

    def right(self, stop: ArrowPoint) -> tuple[float, float]:
        """The point at which arrows leave a stop."""
        return self.xs[stop.column] + self.widths[stop.column], self.ys[stop]


def place(diagram: Diagram) -> Placed:
    """Coordinates for each box and bend, without overlaps and with nearly straight arrows."""
    arrows = [(arrow.source, arrow.target) for arrow in diagram.arrows]
    layering = layer([box.name for box in diagram.boxes], arrows, diagram.sequences)
    boxes = {box.name: box for box in diagram.boxes}
    widths = [max(_width(boxes[stop.box]) for stop in column if not stop.bend) for column in layering.columns]
    xs = [LEFT + sum(widths[:number]) + GAP * number for number in range(len(widths))]
    ys = _heights(layering)
    highest = min((ys[stop] - _room(stop) / 2 for stop in ys), default=0.0)
    ys = {stop: y - highest + TOP for stop, y in ys.items()}
    lowest = max((ys[stop] + _room(stop) / 2 for stop in ys), default=TOP)
    titles = max(width_of(diagram.title, TITLE, bold=True), width_of(diagram.caption, CAPTION))
    width = max(xs[-1] + widths[-1] if xs else 0.0, LEFT + titles) + LEFT
    return Placed(layering, xs, widths, ys, width, lowest + BOTTOM)


def _width(box: Box) -> float:
    return max(width_of(box.name, NAME, bold=True), width_of(box.use, USE)) + 2 * PADDING


def _room(stop: ArrowPoint) -> float:
    return BEND if stop.bend else BOX + BETWEEN


def _heights(layering: Layering) -> dict[ArrowPoint, float]:
    """Middles of stops: columns are moved towards the mean of their neighbours, from left to right and back."""
    ys: dict[ArrowPoint, float] = {}
    for column in layering.columns:
        ys |= _settle(column, [0.0] * len(column))
    neighbours = layering.neighbours
    for sweep in range(STRAIGHTENING_SWEEPS):
        columns: Columns = layering.columns if sweep % 2 == 0 else layering.columns[::-1]
        for column in columns:
            near = [[ys[other] for other in neighbours.get(stop, [])] or [ys[stop]] for stop in column]
            ys |= _settle(column, [sum(some) / len(some) for some in near])
    return ys


def _settle(column: Sequence[ArrowPoint], wishes: Sequence[float]) -> dict[ArrowPoint, float]:
    return dict(zip(column, spread(wishes, [_room(stop) for stop in column]), strict=True))


def width_of(text: str, size: float, *, bold: bool = False) -> float:
    """An upper bound of the width of a text in pixels, in any font."""
    return len(text) * size * BROADEST * (BOLD if bold else 1.0)
