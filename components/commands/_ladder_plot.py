"""A ladder's pictures as SVG: curves over logarithmic axes, below each other."""

import math
from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

import attrs

WIDTH, HEIGHT, LEFT, RIGHT, TOP, GAP = 520, 220, 72, 96, 44, 64
"""Sizes in pixels of a panel's area and of the margins around it."""
INK, PALE, GRID = "#1a1a1a", "#6b6b6b", "#ececec"
COLOURS = ("#3465a4", "#c4561a", "#4e8a2e", "#8c5aa8", "#a08000", "#2a8f8f")
MIN_SPAN = math.log(10)
"""Smallest range of the vertical axis: a flat curve looks flat."""


@attrs.frozen
class Panel:
    """Curves by name over one horizontal axis; all values are positive. Curves in `dashed` have no points."""

    title: str
    x_label: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    dashed: frozenset[str] = frozenset()


def draw_svg_panels(title: str, panels: Sequence[Panel]) -> str:
    """Return an SVG document with the panels below each other, on white."""
    width, height = LEFT + WIDTH + RIGHT, TOP + len(panels) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _format_svg_text(LEFT, 24, title, 15),
    ]
    for number, panel in enumerate(panels):
        parts += _draw_panel(panel, TOP + number * (HEIGHT + GAP))
    return "\n".join([*parts, "</svg>"])


def _draw_panel(panel: Panel, top: float) -> Iterator[str]:
    """Yield a panel's SVG elements below `top`."""
    points = [point for curve in panel.curves.values() for point in curve]
    xs, ys = ([math.log(point[axis]) for point in points] for axis in (0, 1))
    left, span = min(xs), max(max(xs) - min(xs), 1e-9)
    middle, rise = (min(ys) + max(ys)) / 2, max(MIN_SPAN, 1.1 * (max(ys) - min(ys)))
    bottom = top + 20 + HEIGHT

    def place_x(x: float) -> float:
        return LEFT + WIDTH * (math.log(x) - left) / span

    def place_y(y: float) -> float:
        return bottom - HEIGHT * ((math.log(y) - middle) / rise + 0.5)

    yield _format_svg_text(LEFT, top + 10, panel.title, 13)
    for share in (0.0, 0.5, 1.0):
        y, value = bottom - HEIGHT * share, math.exp(middle + rise * (share - 0.5))
        yield f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>'
        yield _format_svg_text(LEFT - 8, y + 4, f"{value:.3g}", 12, PALE, "end")
    measured = [curve for name, curve in panel.curves.items() if name not in panel.dashed]
    for x in sorted({x for curve in measured for x, _ in curve}):
        yield _format_svg_text(place_x(x), bottom + 18, f"{x:.3g}", 12, PALE, "middle")
    yield _format_svg_text(LEFT + WIDTH / 2, bottom + 36, panel.x_label, 12, PALE, "middle")
    label_y = -math.inf
    for (name, curve), colour in sorted(
        zip(panel.curves.items(), (COLOURS[n % len(COLOURS)] for n in range(len(panel.curves))), strict=True),
        key=lambda item: place_y(item[0][1][-1][1]),
    ):
        dash = ' stroke-dasharray="5 4"' if name in panel.dashed else ""
        line = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in curve)
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        for x, y in () if dash else curve:
            yield f'<circle cx="{place_x(x):.1f}" cy="{place_y(y):.1f}" r="3" fill="{colour}"/>'
        # labels at the right, moved down where curves end at the same height
        label_y = max(place_y(curve[-1][1]) + 4, label_y + 13)
        yield _format_svg_text(LEFT + WIDTH + 10, label_y, name, 12, colour)


def _format_svg_text(x: float, y: float, text: str, size: int, colour: str = INK, anchor: str = "start") -> str:
    """Return an SVG text element."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
    )
