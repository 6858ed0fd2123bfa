"""Pixels for a layered picture: how wide columns are, and how high boxes and bends stand."""

from collections.abc import Mapping, Sequence

import attrs

from drawloom.graph.drawing.diagram import Box, Diagram
from drawloom.graph.drawing.sugiyama import Columns, Layering, Stop, layer, spread
from drawloom.graph.drawing.svg import width_of

NAME, USE = 12.5, 10.0
TITLE, CAPTION = 15.0, 11.0
"""Sizes of text, in pixels."""
BOX, BETWEEN, BEND = 36.0, 10.0, 14.0
"""Heights: of a box, of the room between two, of the room that a bend has."""
GAP, PADDING = 104.0, 10.0
LEFT, TOP, BOTTOM = 20.0, 60.0, 20.0
SWEEPS = 10


@attrs.frozen
class Placed:
    """Where everything stands. `xs` and `widths` are of columns, `ys` the middles of stops."""

    layering: Layering
    xs: Sequence[float]
    widths: Sequence[float]
    ys: Mapping[Stop, float]
    width: float
    height: float

    def left(self, stop: Stop) -> tuple[float, float]:
        """Where an arrow comes in."""
        return self.xs[stop.column], self.ys[stop]

    def right(self, stop: Stop) -> tuple[float, float]:
        """Where an arrow goes out."""
        return self.xs[stop.column] + self.widths[stop.column], self.ys[stop]


def assign_coordinates(picture: Diagram) -> Placed:
    """A place for each box and bend, so that nothing overlaps and arrows are as straight as they can be."""
    arrows = [(arrow.source, arrow.target) for arrow in picture.arrows]
    layering = layer([box.name for box in picture.boxes], arrows, picture.sequences)
    boxes = {box.name: box for box in picture.boxes}
    widths = [max(_width(boxes[stop.box]) for stop in column if not stop.bend) for column in layering.columns]
    xs = [LEFT + sum(widths[:number]) + GAP * number for number in range(len(widths))]
    ys = _heights(layering)
    highest = min((ys[stop] - _room(stop) / 2 for stop in ys), default=0.0)
    ys = {stop: y - highest + TOP for stop, y in ys.items()}
    lowest = max((ys[stop] + _room(stop) / 2 for stop in ys), default=TOP)
    titles = max(width_of(picture.title, TITLE, bold=True), width_of(picture.caption, CAPTION))
    width = max(xs[-1] + widths[-1] if xs else 0.0, LEFT + titles) + LEFT
    return Placed(layering, xs, widths, ys, width, lowest + BOTTOM)


def _width(box: Box) -> float:
    return max(width_of(box.name, NAME, bold=True), width_of(box.use, USE)) + 2 * PADDING


def _room(stop: Stop) -> float:
    return BEND if stop.bend else BOX + BETWEEN


def _heights(layering: Layering) -> dict[Stop, float]:
    """Middles, column by column as near as can be to those of their neighbours, to and fro."""
    ys: dict[Stop, float] = {}
    for column in layering.columns:
        ys |= _settle(column, [0.0] * len(column))
    neighbours = layering.neighbours
    for sweep in range(SWEEPS):
        columns: Columns = layering.columns if sweep % 2 == 0 else layering.columns[::-1]
        for column in columns:
            near = [[ys[other] for other in neighbours.get(stop, [])] or [ys[stop]] for stop in column]
            ys |= _settle(column, [sum(some) / len(some) for some in near])
    return ys


def _settle(column: Sequence[Stop], wishes: Sequence[float]) -> dict[Stop, float]:
    return dict(zip(column, spread(wishes, [_room(stop) for stop in column]), strict=True))
