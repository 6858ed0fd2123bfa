"""Pictures of what changes over the steps of a run, such as the learning rate: as text, and as SVG."""

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

import attrs

BLOCKS = " ▁▂▃▄▅▆▇█"
HEIGHT = 10  # lines of a picture in the terminal
WIDE, HIGH, LEFT, RIGHT, TOP, GAP = 720, 200, 84, 24, 48, 56
"""Pixels: of the area of a curve, and around it."""
INK, PALE, LINE = "#1a1a1a", "#6b6b6b", "#3465a4"


@attrs.frozen
class Curve:
    """A value at some steps, which ascend; it is drawn from 0."""

    name: str
    points: Sequence[tuple[int, float]]

    @property
    def highest(self) -> float:
        """The largest value."""
        return max(value for _, value in self.points)

    @property
    def last(self) -> int:
        """The last step."""
        return self.points[-1][0]

    def at(self, step: float) -> float:
        """The value at the last of the steps up to this one."""
        return next((value for each, value in reversed(self.points) if each <= step), self.points[0][1])


def short(value: float) -> str:
    """A value in few characters."""
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 1 else f"{value:.3g}"


def draw_text(curves: Sequence[Curve], width: int) -> str:
    """Each curve as columns of blocks, `width` characters wide."""
    return "\n\n".join("\n".join(_lines(curve, width)) for curve in curves)


def _lines(curve: Curve, width: int) -> Iterator[str]:
    yield curve.name
    labels = [short(curve.highest), "0"]
    margin = max(map(len, labels))
    columns = max(10, width - margin - 2)
    steps = [1 + (curve.last - 1) * column / max(columns - 1, 1) for column in range(columns)]
    eighths = [round(curve.at(step) / (curve.highest or 1) * HEIGHT * 8) for step in steps]
    for line in range(HEIGHT - 1, -1, -1):
        label = labels[0] if line == HEIGHT - 1 else labels[1] if line == 0 else ""
        yield f"{label:>{margin}} │{''.join(BLOCKS[min(max(each - 8 * line, 0), 8)] for each in eighths)}".rstrip()
    last = f"step {curve.last:,}"
    yield f"{'':>{margin}} └{'─' * columns}"
    yield f"{'':>{margin}}  {'1':<{columns - len(last)}}{last}"


def draw_svg(title: str, curves: Sequence[Curve]) -> str:
    """An SVG document, on white: a curve below the other, over the same steps."""
    height = TOP + len(curves) * (HIGH + GAP)
    width = LEFT + WIDE + RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 26, title, 16, INK),
    ]
    for number, curve in enumerate(curves):
        parts += _panel(curve, TOP + number * (HIGH + GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(curve: Curve, top: float) -> Iterator[str]:
    bottom, span = top + 20 + HIGH, max(curve.last - 1, 1)

    def place(step: int, value: float) -> str:
        x = LEFT + WIDE * (step - 1) / span
        return f"{x:.1f},{bottom - HIGH * value / (curve.highest or 1):.1f}"

    yield _text(LEFT, top + 10, curve.name, 13, INK)
    for share in (0.0, 0.5, 1.0):
        y = bottom - HIGH * share
        yield f'<line x1="{LEFT}" x2="{LEFT + WIDE}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ececec"/>'
        yield _text(LEFT - 8, y + 4, short(curve.highest * share), 12, PALE, "end")
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        step = round(1 + span * share)
        yield _text(LEFT + WIDE * share, bottom + 18, f"{step:,}", 12, PALE, "middle")
    points = " ".join(place(step, value) for step, value in curve.points)
    yield f'<polyline points="{points}" fill="none" stroke="{LINE}" stroke-width="2"/>'


def _text(x: float, y: float, text: str, size: int, colour: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
    )
