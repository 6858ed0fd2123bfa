"""
A walk through a sequence as cloth: members are the warp, from left to right, and values the weft that passes them.

A thread begins where its value is written. A disc writes, a diamond changes, a ring reads.
"""

from collections.abc import Iterator

import attrs

from drawloom.graph.drawing.coordinates import BOX, LEFT, NAME, PADDING, TITLE, USE
from drawloom.graph.drawing.step import Step, Thread
from drawloom.graph.drawing.svg import (
    BOLD_TEXT,
    END,
    GREY,
    HALO,
    INK,
    MIDDLE,
    Colour,
    colours,
    document,
    n,
    safe,
    text,
    width_of,
)

TOP, ROW, BETWEEN, LEGEND = 48.0, 32.0, 12.0, 46.0
VALUE = 12.0
MARK = 5.5


def draw_step(step: Step) -> str:
    """An SVG document."""
    drawing = _Drawing(step)
    return document(step.title, drawing.width, drawing.bottom + LEGEND, drawing.lines())


@attrs.define(eq=False)
class _Drawing:
    """Columns for members, rows for threads."""

    step: Step
    middles: list[float] = attrs.field(init=False)
    widths: list[float] = attrs.field(init=False)
    margin: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        boxes = self.step.members
        self.margin = max((width_of(thread.title, VALUE) for thread in self.step.threads), default=0.0) + 14
        self.widths = [max(width_of(b.name, NAME, bold=True), width_of(b.use, USE)) + 2 * PADDING for b in boxes]
        starts = [sum(self.widths[:number]) + BETWEEN * number for number in range(len(boxes))]
        self.middles = [
            LEFT + self.margin + start + width / 2 for start, width in zip(starts, self.widths, strict=True)
        ]

    @property
    def right(self) -> float:
        return self.middles[-1] + self.widths[-1] / 2

    @property
    def width(self) -> float:
        legend = LEFT + self.margin + 3 * 36 + width_of("writeschangesreads", 11)
        return max(self.right, legend, LEFT + width_of(self.step.title, TITLE, bold=True)) + LEFT

    @property
    def bottom(self) -> float:
        """Where the warp ends."""
        return TOP + BOX + ROW * (len(self.step.threads) + 0.5)

    def lines(self) -> Iterator[str]:
        yield text(LEFT, 26, self.step.title, TITLE, more=BOLD_TEXT)
        hues = colours([thread.value for thread in self.step.threads])
        for x in self.middles:
            yield f'<path d="M{n(x)} {n(TOP + BOX)}V{n(self.bottom)}" stroke="#dcdcdc" stroke-width="7"/>'
        for number in range(len(self.middles)):
            yield from self._header(number)
        for row, thread in enumerate(self.step.threads):
            yield from self._thread(thread, TOP + BOX + ROW * (row + 0.75), hues[thread.value])
        yield from self._legend()

    def _header(self, number: int) -> Iterator[str]:
        box, x, width = self.step.members[number], self.middles[number], self.widths[number]
        yield (
            f'<rect x="{n(x - width / 2)}" y="{n(TOP)}" width="{n(width)}" height="{n(BOX)}" rx="5" fill="#f4f4f4" '
            f'stroke="{GREY}" stroke-width="1.2"/>'
        )
        yield text(x, TOP + BOX / 2 - 2.5, box.name, NAME, INK, BOLD_TEXT + MIDDLE)
        yield text(x, TOP + BOX / 2 + 11.5, box.use, USE, GREY, MIDDLE)

    def _thread(self, thread: Thread, y: float, colour: Colour) -> Iterator[str]:
        first, last = self.middles[min(thread.touches)], self.middles[max(thread.touches)]
        yield text(first - MARK - 7, y + 4, thread.title, VALUE, colour.strong, END + HALO)
        yield f'<path d="M{n(first)} {n(y)}H{n(last)}" stroke="{colour.strong}" stroke-width="3"/>'
        for number, verb in thread.touches.items():
            words = f"{self.step.members[number].name} {verb} {thread.value}"
            yield _mark(verb, self.middles[number], y, colour.strong, words)

    def _legend(self) -> Iterator[str]:
        x, y = LEFT + self.margin, self.bottom + 24
        for verb in ("writes", "changes", "reads"):
            yield _mark(verb, x + MARK, y, GREY, verb)
            yield text(x + 18, y + 4, verb, 11, GREY)
            x += 36 + width_of(verb, 11)


def _mark(verb: str, x: float, y: float, colour: str, words: str) -> str:
    """A sign on a thread, with words for whoever points at it."""
    tip, size = f"<title>{safe(words)}</title>", MARK + 1.5
    if verb == "changes":
        shape = f"M{n(x - size)} {n(y)}L{n(x)} {n(y - size)}L{n(x + size)} {n(y)}L{n(x)} {n(y + size)}z"
        return f'<path d="{shape}" fill="{colour}" stroke="#fff" stroke-width="1.5">{tip}</path>'
    inside, line = (colour, "#fff") if verb == "writes" else ("#fff", colour)
    return (
        f'<circle cx="{n(x)}" cy="{n(y)}" r="{n(MARK)}" fill="{inside}" stroke="{line}" stroke-width="2">{tip}</circle>'
    )
