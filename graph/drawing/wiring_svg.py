"""
The wiring as an SVG: boxes in the colours of their subjects, arrows in the colour of the box that they lead to.

The name of a field stands at its arrow where there is room for it and it says more than the name of the box. A tooltip
on each arrow has all names.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise

import attrs

from drawloom.graph.drawing.coordinates import (
    BOX,
    CAPTION,
    GAP,
    LEFT,
    NAME,
    PADDING,
    TITLE,
    USE,
    Placed,
    assign_coordinates,
)
from drawloom.graph.drawing.diagram import Arrow, Box, Diagram
from drawloom.graph.drawing.sugiyama import Stop
from drawloom.graph.drawing.svg import (
    BOLD_TEXT,
    END,
    GREY,
    HALO,
    INK,
    Colour,
    colours,
    document,
    n,
    safe,
    text,
    width_of,
)

LABEL = 9.0
"""The size of a field's name, in pixels."""
HEAD = 6.0

Area = tuple[float, float, float, float]
"""Left, top, right and bottom."""

Label = tuple[str, str, float, float, str]
"""Words, the box whose arrow they are about, x, y, and to which side of that they stand."""


def draw_wiring(picture: Diagram) -> str:
    """An SVG document."""
    placed = assign_coordinates(picture)
    return document(picture.title, placed.width, placed.height, _Drawing(picture, placed).lines())


@attrs.define(eq=False)
class _Drawing:
    """A picture whose parts have their places."""

    picture: Diagram
    placed: Placed
    colours: Mapping[str, Colour] = attrs.field(init=False)
    stops: Mapping[str, Stop] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        hues = colours(self.picture.subjects)
        self.colours = {box.name: hues[box.subject] for box in self.picture.boxes}
        self.stops = {stop.box: stop for stop in self.placed.ys if not stop.bend}

    def lines(self) -> Iterator[str]:
        yield text(LEFT, 26, self.picture.title, TITLE, more=BOLD_TEXT)
        yield text(LEFT, 44, self.picture.caption, CAPTION, GREY)
        yield from self._roads()
        yield from self._labels()
        for box in self.picture.boxes:
            yield from self._box(box)

    def _box(self, box: Box) -> Iterator[str]:
        (x, y), colour = self.placed.left(self.stops[box.name]), self.colours[box.name]
        width, thick = self.placed.widths[self.stops[box.name].column], box.name == self.picture.focus
        yield (
            f'<rect x="{n(x)}" y="{n(y - BOX / 2)}" width="{n(width)}" height="{n(BOX)}" rx="5" fill="{colour.pale}" '
            f'stroke="{colour.strong}" stroke-width="{3 if thick else 1.2}"/>'
        )
        yield text(x + PADDING, y - 2.5, box.name, NAME, INK, BOLD_TEXT)
        yield text(x + PADDING, y + 11.5, box.use, USE, GREY)

    def _roads(self) -> Iterator[str]:
        """Every piece once, named after the arrows that take it."""
        takers: dict[tuple[Stop, Stop], list[Arrow]] = {}
        for arrow in self.picture.arrows:
            way = self.placed.layering.ways[arrow.source, arrow.target]
            for piece in pairwise(way):
                takers.setdefault(piece, []).append(arrow)
        for (start, end), arrows in takers.items():
            colour = self.colours[end.box].strong
            names = safe("; ".join(f"{arrow.source} {arrow.label}: {arrow.target}" for arrow in arrows))
            path = self._path(start, end)
            yield (
                f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.3" stroke-opacity="0.75">'
                f"<title>{names}</title></path>"
            )
            if not end.bend:
                x, y = self.placed.left(end)
                yield f'<path d="M{n(x)} {n(y)}l{n(-HEAD - 1)} -3.5v7z" fill="{colour}"/>'

    def _path(self, start: Stop, end: Stop) -> str:
        """Straight below other boxes, and a curve through the gap between columns."""
        begin = self.placed.left(start) if start.bend else self.placed.right(start)
        (x, y), (to_x, to_y) = self.placed.right(start), self.placed.left(end)
        to_x -= 0 if end.bend else HEAD
        bend = (to_x - x) / 2
        return (
            f"M{n(begin[0])} {n(begin[1])}H{n(x)}C{n(x + bend)} {n(y)} {n(to_x - bend)} {n(to_y)} {n(to_x)} {n(to_y)}"
        )

    def _labels(self) -> Iterator[str]:
        """Names of fields, where one is said of all arrows at a place and fits."""
        taken: list[Area] = []
        for label, box, x, y, more in [*self._where_arrows_end(), *self._where_arrows_begin()]:
            width = width_of(label, LABEL)
            left = x - width if more == END else x
            area = (left, y - LABEL, left + width, y + 2)
            if width < GAP - 3 * HEAD and not any(_overlap(area, other) for other in taken):
                taken.append(area)
                yield text(x, y, label, LABEL, self.colours[box].strong, more + HALO)

    def _where_arrows_end(self) -> Iterator[Label]:
        for stop, labels in self._meeting(1).items():
            if len(labels) == 1:
                (x, y), (label, box) = self.placed.left(stop), labels[0]
                yield label, box, x - (2 if stop.bend else HEAD + 4), y - 3, END

    def _where_arrows_begin(self) -> Iterator[Label]:
        ends = self._meeting(1)
        for stop, labels in self._meeting(0).items():
            if len(labels) == 1 and all(len(found) > 1 for found in ends.values() if labels[0] in found):
                (x, y), (label, box) = self.placed.right(stop), labels[0]
                yield label, box, x + 5, y - 4, ""

    def _meeting(self, place: int) -> dict[Stop, list[tuple[str, str]]]:
        """The labels of the arrows with a stop as their first or second, each with the box it leads to, each once."""
        found: dict[Stop, list[tuple[str, str]]] = {}
        for arrow in self.picture.arrows:
            here = found.setdefault(self.placed.layering.ways[arrow.source, arrow.target][place], [])
            label = (arrow.label, arrow.target)
            here += [label] if label not in here else []
        plain = {stop: [(label, box) for label, box in labels] for stop, labels in found.items()}
        return {stop: labels for stop, labels in plain.items() if labels[0][0] != labels[0][1].rpartition(".")[2]}


def _overlap(one: Area, other: Area) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
