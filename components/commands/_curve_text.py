"""Curves over each other, drawn with letters for a terminal."""

import string
from collections.abc import Mapping, Sequence

from drawloom.components.report.metrics import MetricCurve

LETTERS = string.ascii_lowercase
HEIGHT = 12
"""Lines of a picture."""


def draw_curves(title: str, curves: Mapping[str, MetricCurve], width_in_characters: int) -> str:
    """
    Draw a metric's curves, one letter per curve, `width_in_characters` wide; `*` marks a cell with several curves.

    The picture begins at the steps' first tenth if the curve falls steeply, as a loss does, so that its end is visible.
    """
    last = max(curve.x[-1] for curve in curves.values())
    start = last / 10 if last >= HEIGHT * 10 else 0
    shown = [[(x, y) for x, y in zip(curve.x, curve.y, strict=True) if x >= start] for curve in curves.values()]
    values = [y for points in shown for _, y in points]
    low, high = min(values), max(values)
    labels = [f"{high:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels))
    columns = max(10, width_in_characters - margin - 2)
    cells = [[" "] * columns for _ in range(HEIGHT)]
    first = min(x for points in shown for x, _ in points)
    for letter, points in zip(LETTERS, shown, strict=False):
        for x, y in points:
            column = round((columns - 1) * (x - first) / ((last - first) or 1))
            line = round((HEIGHT - 1) * (high - y) / ((high - low) or 1))
            cells[line][column] = letter if cells[line][column] in (" ", letter) else "*"
    head = [title, *(f"  {letter} {name}" for letter, name in zip(LETTERS, curves, strict=False))]
    lines = [f"{_axis_label(labels, number):>{margin}} │{''.join(cell)}".rstrip() for number, cell in enumerate(cells)]
    end = f"step {last:,}"
    axis = f"{'':>{margin}}  {f'{first:,}':<{max(columns - len(end), 1)}}{end}"
    return "\n".join([*head, *lines, f"{'':>{margin}} └{'─' * columns}", axis])


def _axis_label(top_and_bottom: Sequence[str], line_number: int) -> str:
    """Return the label at the left of a picture's line: the first label at the top, the second at the bottom."""
    return top_and_bottom[0] if line_number == 0 else top_and_bottom[1] if line_number == HEIGHT - 1 else ""
