"""Draw a graph's wiring, and the dataflow of a step, as SVG documents."""

import colorsys
import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import attrs

from drawloom.graph.component import internal
from drawloom.graph.drawing.diagram import Arrow, Diagram, SequenceDrawing, ValueTrace
from drawloom.graph.drawing.layout import (
    BOX,
    CAPTION,
    GAP,
    LEFT,
    NAME,
    PADDING,
    TITLE,
    USE,
    ArrowPoint,
    PlacedDiagram,
    estimate_box_width,
    estimate_max_text_width,
    place_boxes,
)

INK, GREY = "#1a1a1a", "#6b6b6b"
FONT = "Helvetica, Arial, sans-serif"


@attrs.frozen
class Colour:
    """A hue: `strong` for lines, `pale` for areas behind text."""

    strong: str
    pale: str


def assign_colours(names: Sequence[str]) -> dict[str, Colour]:
    """Assign a hue to every name, spread over the colour wheel. Neighbours in the list get distant hues."""
    # A stride coprime to the number of names visits every hue once.
    stride = next(step for step in (5, 7, 11, 13, 1) if step == 1 or len(names) % step)
    hues = [(0.58 + stride * number / max(1, len(names))) % 1 for number in range(len(names))]
    return {
        name: Colour(_format_hex(hue, 0.40, 0.55), _format_hex(hue, 0.94, 0.60))
        for name, hue in zip(names, hues, strict=True)
    }


def _format_hex(hue: float, lightness: float, saturation: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, lightness, saturation))


def make_text_element(x: float, y: float, words: str, size: float, colour: str = INK, attributes: str = "") -> str:
    """Return a text element with its left end (or the `text-anchor` in `attributes`) at x, and its baseline at y."""
    style = f'font-size="{num(size)}" fill="{colour}"{attributes}'
    return f'<text x="{num(x)}" y="{num(y)}" {style}>{escape_xml(words)}</text>'


def draw_text_with_halo(
    x: float, y: float, words: str, size: float, colour: str, attributes: str = ""
) -> Iterator[str]:
    """Yield a text over lines, preceded by its outline in white: not all renderers support `paint-order`."""
    yield make_text_element(x, y, words, size, "none", attributes + HALO)
    yield make_text_element(x, y, words, size, colour, attributes)


BOLD_TEXT = ' font-weight="bold"'
MIDDLE = ' text-anchor="middle"'
END = ' text-anchor="end"'
HALO = ' stroke="#fff" stroke-width="3" stroke-linejoin="round" aria-hidden="true"'


def make_svg_document(title: str, width: float, height: float, body: Iterable[str]) -> str:
    """Return an SVG document with a white background."""
    size = f'viewBox="0 0 {num(width)} {num(height)}" width="{num(width)}" height="{num(height)}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">',
        f"<title>{escape_xml(title)}</title>",
        f'<rect width="{num(width)}" height="{num(height)}" fill="#fff"/>',
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def escape_xml(words: str) -> str:
    """Escape text for XML or HTML. Unprintable characters, such as direction marks, become U+FFFD."""
    return html.escape(replace_unprintable(words))


def replace_unprintable(words: str) -> str:
    """Replace characters not allowed in XML, or without a picture, by U+FFFD."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in words)


def num(number: float) -> str:
    """Format a number with at most two decimals."""
    return f"{round(number, 2) + 0.0:.2f}".rstrip("0").rstrip(".")


def format_point(x: float, y: float) -> str:
    """Return a pair of coordinates for a path."""
    return f"{num(x)} {num(y)}"


def make_box_element(x: float, y: float, width: float, fill: str, stroke: str, stroke_width: float) -> str:
    """Return a rectangle with a box's height and its top left corner at (x, y)."""
    return (
        f'<rect x="{num(x)}" y="{num(y)}" width="{num(width)}" height="{num(BOX)}" rx="5" fill="{fill}" '
        f'stroke="{stroke}" stroke-width="{stroke_width}"/>'
    )


LABEL = 9.0
"""The size of a field's name, in pixels."""
HEAD = 6.0

Area = tuple[float, float, float, float]
"""Left, top, right and bottom."""

Label = tuple[str, str, float, float, str]
"""Text, the box at the end of its arrow, x, y, and the text-anchor."""


def draw_wiring(diagram: Diagram) -> str:
    """Draw a diagram as an SVG document."""
    placed = place_boxes(diagram)
    return make_svg_document(
        diagram.title, placed.width, placed.height, _WiringDrawing(diagram, placed).draw_elements()
    )


@attrs.define(eq=False)
class _WiringDrawing:
    """A diagram at the coordinates of its layout."""

    diagram: Diagram
    placed: PlacedDiagram
    colours: Mapping[str, Colour] = internal()
    points: Mapping[str, ArrowPoint] = internal()

    def __attrs_post_init__(self) -> None:
        hues = assign_colours(self.diagram.component_folders)
        self.colours = {box.name: hues[box.component_folder] for box in self.diagram.boxes}
        self.points = {point.box: point for point in self.placed.ys if not point.is_bend}

    def draw_elements(self) -> Iterator[str]:
        yield make_text_element(LEFT, 26, self.diagram.title, TITLE, attributes=BOLD_TEXT)
        yield make_text_element(LEFT, 44, self.diagram.caption, CAPTION, GREY)
        yield from self._draw_segments()
        yield from self._draw_labels()
        for box in self.diagram.boxes:
            (x, y), colour = self.placed.entry_point(self.points[box.name]), self.colours[box.name]
            width, thick = self.placed.widths[self.points[box.name].column], box.name == self.diagram.focus
            yield make_box_element(x, y - BOX / 2, width, colour.pale, colour.strong, 3 if thick else 1.2)
            yield make_text_element(x + PADDING, y - 2.5, box.name, NAME, INK, BOLD_TEXT)
            yield make_text_element(x + PADDING, y + 11.5, box.use, USE, GREY)

    def _draw_segments(self) -> Iterator[str]:
        """Yield every segment once, titled with the arrows sharing it."""
        arrows_by_segment: dict[tuple[ArrowPoint, ArrowPoint], list[Arrow]] = {}
        for arrow in self.diagram.arrows:
            route = self.placed.layering.routes[arrow.source, arrow.target]
            for segment in pairwise(route):
                arrows_by_segment.setdefault(segment, []).append(arrow)
        for (start, end), arrows in arrows_by_segment.items():
            colour = self.colours[end.box].strong
            names = escape_xml("; ".join(f"{arrow.source} {arrow.label}: {arrow.target}" for arrow in arrows))
            path = self._trace_segment(start, end)
            yield (
                f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.3" stroke-opacity="0.75">'
                f"<title>{names}</title></path>"
            )
            if not end.is_bend:
                x, y = self.placed.entry_point(end)
                yield f'<path d="M{num(x)} {num(y)}l{num(-HEAD - 1)} -3.5v7z" fill="{colour}"/>'

    def _trace_segment(self, start: ArrowPoint, end: ArrowPoint) -> str:
        """Return a line through a column and a curve through the gap to the next column."""
        begin, begin_y = self.placed.entry_point(start) if start.is_bend else self.placed.exit_point(start)
        (x, y), (to_x, to_y) = self.placed.exit_point(start), self.placed.entry_point(end)
        to_x -= 0 if end.is_bend else HEAD
        bend = (to_x - x) / 2
        curve = f"C{format_point(x + bend, y)} {format_point(to_x - bend, to_y)} {format_point(to_x, to_y)}"
        return f"M{format_point(begin, begin_y)}H{num(x)}{curve}"

    def _draw_labels(self) -> Iterator[str]:
        """Yield names of fields at points where all arrows have the same field, unless they overlap other names."""
        occupied: list[Area] = []
        for label, box, x, y, anchor in [*self._make_end_labels(), *self._make_start_labels()]:
            width = estimate_max_text_width(label, LABEL)
            left = x - width if anchor == END else x
            area = (left, y - LABEL, left + width, y + LABEL / 3)  # with descenders
            if width < GAP - 3 * HEAD and not any(_do_areas_overlap(area, other) for other in occupied):
                occupied.append(area)
                yield from draw_text_with_halo(x, y, label, LABEL, self.colours[box].strong, anchor)

    def _make_end_labels(self) -> Iterator[Label]:
        for point, labels in self._list_labels_by_point(1).items():
            if len(labels) == 1:
                (x, y), (label, box) = self.placed.entry_point(point), labels[0]
                yield label, box, x - (2 if point.is_bend else HEAD + 4), y - 3, END

    def _make_start_labels(self) -> Iterator[Label]:
        ends = self._list_labels_by_point(1)
        for point, labels in self._list_labels_by_point(0).items():
            if len(labels) == 1 and all(len(others) > 1 for others in ends.values() if labels[0] in others):
                (x, y), (label, box) = self.placed.exit_point(point), labels[0]
                yield label, box, x + 5, y - 4, ""

    def _list_labels_by_point(self, point_index: int) -> dict[ArrowPoint, list[tuple[str, str]]]:
        """Return arrow labels by first or second point, with target boxes, without duplicates."""
        found: dict[ArrowPoint, list[tuple[str, str]]] = {}
        for arrow in self.diagram.arrows:
            here = found.setdefault(self.placed.layering.routes[arrow.source, arrow.target][point_index], [])
            label = (arrow.label, arrow.target)
            here += [label] if label not in here else []
        plain = {point: [(label, box) for label, box in labels] for point, labels in found.items()}
        return {point: labels for point, labels in plain.items() if labels[0][0] != labels[0][1].rpartition(".")[2]}


def _do_areas_overlap(area: Area, other: Area) -> bool:
    return area[0] < other[2] and other[0] < area[2] and area[1] < other[3] and other[1] < area[3]


HEADER, ROW, SPACING, LEGEND = 48.0, 32.0, 12.0, 46.0
VALUE = 12.0
RADIUS = 5.5


def draw_step(step: SequenceDrawing) -> str:
    """Draw a step's dataflow as an SVG document."""
    drawing = _StepDrawing(step)
    return make_svg_document(step.title, drawing.width, drawing.bottom + LEGEND, drawing.draw_elements())


@attrs.define(eq=False)
class _StepDrawing:
    """A step as a table: columns are members, rows are values."""

    step: SequenceDrawing
    middles: list[float] = internal()
    widths: list[float] = internal()
    margin: float = internal()

    def __attrs_post_init__(self) -> None:
        boxes = self.step.members
        self.margin = max((estimate_max_text_width(trace.title, VALUE) for trace in self.step.traces), default=0.0) + 14
        self.widths = [estimate_box_width(box) for box in boxes]
        starts = [sum(self.widths[:number]) + SPACING * number for number in range(len(boxes))]
        self.middles = [
            LEFT + self.margin + start + width / 2 for start, width in zip(starts, self.widths, strict=True)
        ]

    @property
    def right(self) -> float:
        return self.middles[-1] + self.widths[-1] / 2

    @property
    def width(self) -> float:
        legend = LEFT + self.margin + 3 * 36 + estimate_max_text_width("writeschangesreads", 11)
        return max(self.right, legend, LEFT + estimate_max_text_width(self.step.title, TITLE, bold=True)) + LEFT

    @property
    def bottom(self) -> float:
        """The y coordinate at which the columns end."""
        return HEADER + BOX + ROW * (len(self.step.traces) + 0.5)

    def draw_elements(self) -> Iterator[str]:
        yield make_text_element(LEFT, 26, self.step.title, TITLE, attributes=BOLD_TEXT)
        hues = assign_colours([trace.value for trace in self.step.traces])
        for x in self.middles:
            yield f'<path d="M{num(x)} {num(HEADER + BOX)}V{num(self.bottom)}" stroke="#dcdcdc" stroke-width="7"/>'
        for number in range(len(self.middles)):
            yield from self._draw_column_header(number)
        for row, trace in enumerate(self.step.traces):
            yield from self._draw_trace(trace, HEADER + BOX + ROW * (row + 0.75), hues[trace.value])
        yield from self._draw_legend()

    def _draw_column_header(self, number: int) -> Iterator[str]:
        box, x, width = self.step.members[number], self.middles[number], self.widths[number]
        yield make_box_element(x - width / 2, HEADER, width, "#f4f4f4", GREY, 1.2)
        yield make_text_element(x, HEADER + BOX / 2 - 2.5, box.name, NAME, INK, BOLD_TEXT + MIDDLE)
        yield make_text_element(x, HEADER + BOX / 2 + 11.5, box.use, USE, GREY, MIDDLE)

    def _draw_trace(self, trace: ValueTrace, y: float, colour: Colour) -> Iterator[str]:
        first, last = self.middles[min(trace.access_by_member)], self.middles[max(trace.access_by_member)]
        yield from draw_text_with_halo(first - RADIUS - 7, y + 4, trace.title, VALUE, colour.strong, END)
        yield f'<path d="M{num(first)} {num(y)}H{num(last)}" stroke="{colour.strong}" stroke-width="3"/>'
        for number, verb in trace.access_by_member.items():
            words = f"{self.step.members[number].name} {verb} {trace.value}"
            yield _draw_access_mark(verb, self.middles[number], y, colour.strong, words)

    def _draw_legend(self) -> Iterator[str]:
        x, y = LEFT + self.margin, self.bottom + 24
        for verb in ("writes", "changes", "reads"):
            yield _draw_access_mark(verb, x + RADIUS, y, GREY, verb)
            yield make_text_element(x + 18, y + 4, verb, 11, GREY)
            x += 36 + estimate_max_text_width(verb, 11)


def _draw_access_mark(access: str, x: float, y: float, colour: str, tooltip: str) -> str:
    """Draw the mark for a member's access to a value, with a tooltip."""
    tip, size = f"<title>{escape_xml(tooltip)}</title>", RADIUS + 1.5
    if access == "changes":
        corners = ((x - size, y), (x, y - size), (x + size, y), (x, y + size))
        shape = "M" + "L".join(format_point(corner_x, corner_y) for corner_x, corner_y in corners) + "z"
        return f'<path d="{shape}" fill="{colour}" stroke="#fff" stroke-width="1.5">{tip}</path>'
    inside, line = (colour, "#fff") if access == "writes" else ("#fff", colour)
    colours_of = f'fill="{inside}" stroke="{line}" stroke-width="2"'
    return f'<circle cx="{num(x)}" cy="{num(y)}" r="{num(RADIUS)}" {colours_of}>{tip}</circle>'
