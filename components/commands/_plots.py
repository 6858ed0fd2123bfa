"""Plots of curves: with letters for a terminal, and as panels below each other in SVG."""

import math
import string
from collections.abc import Iterator, Mapping, Sequence

import attrs

from drawloom.graph.drawing.svg import END, GREY, MIDDLE, make_svg_document, make_text_element, num

Points = Sequence[tuple[float, float]]

HEIGHT = 12
"""Lines of a picture in a terminal."""

PANEL_WIDTH, PANEL_HEIGHT, LEFT, RIGHT, TOP, GAP = 520, 220, 72, 96, 44, 64
"""Sizes in pixels of a panel's area and of the margins around it."""
GRID = "#ececec"
COLOURS = ("#3465a4", "#c4561a", "#4e8a2e", "#8c5aa8", "#a08000", "#2a8f8f")
MIN_SPAN = math.log(10)
"""Smallest range of a logarithmic vertical axis: a flat curve looks flat."""
MAX_MARKED = 20
"""Maximum points of a curve whose points are marked."""


def draw_text_plot(title: str, curves: Mapping[str, Points], width: int) -> str:
    """Draw curves over steps, a letter for each, `width` characters wide; `*` marks a cell with several curves."""
    points = [point for curve in curves.values() for point in curve]
    xs, ys = ([point[axis] for point in points] for axis in (0, 1))
    first, last, low, high = min(xs), max(xs), min(ys), max(ys)
    labels = {0: f"{high:.4g}", HEIGHT - 1: f"{low:.4g}"}
    margin = max(map(len, labels.values()))
    columns = max(10, width - margin - 2)
    cells = [[" "] * columns for _ in range(HEIGHT)]
    for letter, curve in zip(string.ascii_lowercase, curves.values(), strict=False):
        for x, y in curve:
            column = round((columns - 1) * (x - first) / ((last - first) or 1))
            line = round((HEIGHT - 1) * (high - y) / ((high - low) or 1))
            cells[line][column] = letter if cells[line][column] in (" ", letter) else "*"
    names = [f"  {letter} {name}" for letter, name in zip(string.ascii_lowercase, curves, strict=False) if name]
    lines = [f"{labels.get(number, ''):>{margin}} │{''.join(cell)}".rstrip() for number, cell in enumerate(cells)]
    end = f"step {last:,}"
    axis = f"{'':>{margin}}  {f'{first:,}':<{max(columns - len(end), 1)}}{end}"
    return "\n".join([title, *names, *lines, f"{'':>{margin}} └{'─' * columns}", axis])


@attrs.frozen
class Panel:
    """
    Curves by name over one horizontal axis; curves in `dashed` have no marks.

    If it is logarithmic, both axes are, and all values are positive. Otherwise the vertical axis begins at 0.
    """

    title: str
    x_label: str
    curves: Mapping[str, Points]
    dashed: frozenset[str] = frozenset()
    is_logarithmic: bool = True


def draw_svg_panels(title: str, panels: Sequence[Panel]) -> str:
    """Return an SVG document with the panels below each other, on white."""
    elements = [make_text_element(LEFT, 24, title, 15)]
    for number, panel in enumerate(panels):
        elements += _draw_panel(panel, TOP + number * (PANEL_HEIGHT + GAP))
    height = TOP + len(panels) * (PANEL_HEIGHT + GAP)
    return make_svg_document(title, LEFT + PANEL_WIDTH + RIGHT, height, elements).removesuffix("\n")


def _draw_panel(panel: Panel, top: float) -> Iterator[str]:
    """Yield a panel's SVG elements below `top`."""
    scale, unscale = (math.log, math.exp) if panel.is_logarithmic else (float, float)
    points = [point for curve in panel.curves.values() for point in curve]
    xs, ys = ([scale(point[axis]) for point in points] for axis in (0, 1))
    left, span = min(xs), max(max(xs) - min(xs), 1e-9)
    rise = max(MIN_SPAN, 1.1 * (max(ys) - min(ys))) if panel.is_logarithmic else max(ys) or 1.0
    low = (min(ys) + max(ys) - rise) / 2 if panel.is_logarithmic else 0.0
    bottom = top + 20 + PANEL_HEIGHT

    def place_x(x: float) -> float:
        return LEFT + PANEL_WIDTH * (scale(x) - left) / span

    def place_y(y: float) -> float:
        return bottom - PANEL_HEIGHT * (scale(y) - low) / rise

    yield make_text_element(LEFT, top + 10, panel.title, 13)
    for share in (0.0, 0.5, 1.0):
        y, value = bottom - PANEL_HEIGHT * share, unscale(low + rise * share)
        yield f'<line x1="{LEFT}" x2="{LEFT + PANEL_WIDTH}" y1="{num(y)}" y2="{num(y)}" stroke="{GRID}"/>'
        yield make_text_element(LEFT - 8, y + 4, format_short(value), 12, GREY, END)
    measured = sorted({x for name, curve in panel.curves.items() if name not in panel.dashed for x, _ in curve})
    for x in measured[:: -(-len(measured) // 8)]:
        yield make_text_element(place_x(x), bottom + 18, format_short(x), 12, GREY, MIDDLE)
    yield make_text_element(LEFT + PANEL_WIDTH / 2, bottom + 36, panel.x_label, 12, GREY, MIDDLE)
    label_y = -math.inf
    coloured = [(name, curve, COLOURS[n % len(COLOURS)]) for n, (name, curve) in enumerate(panel.curves.items())]
    for name, curve, colour in sorted(coloured, key=lambda item: place_y(item[1][-1][1])):
        dash = ' stroke-dasharray="5 4"' if name in panel.dashed else ""
        line = " ".join(f"{num(place_x(x))},{num(place_y(y))}" for x, y in curve)
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        for x, y in () if dash or len(curve) > MAX_MARKED else curve:
            yield f'<circle cx="{num(place_x(x))}" cy="{num(place_y(y))}" r="3" fill="{colour}"/>'
        # labels at the right, moved down where curves end at the same height
        label_y = max(place_y(curve[-1][1]) + 4, label_y + 13)
        yield make_text_element(LEFT + PANEL_WIDTH + 10, label_y, name, 12, colour)


def format_short(value: float) -> str:
    """Format a number with few characters."""
    return f"{value:,.0f}" if value == int(value) and 1 <= abs(value) < 1e7 else f"{value:.3g}"
