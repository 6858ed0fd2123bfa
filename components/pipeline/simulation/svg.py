"""
Timeline as SVG: a row per rank, a bar per action, time from left to right.

The colour is the op, its shade the local stage, and the number the microbatch. The parts of an overlap share a frame.
Grey is idle time. At the right of a row is the rank's peak of live stage-microbatches. Below a row, thin bars show when
sharded weights are gathered and gradients reduced, and when activations leave for host memory and return.
"""

import math
from collections.abc import Iterator

import attrs

from drawloom import internal
from drawloom.components.pipeline.program.builders import index_stages_on_ranks
from drawloom.components.pipeline.simulation.simulator import Bar, Simulation
from drawloom.graph.drawing.svg import BOLD_TEXT, END, GREY, INK, MIDDLE, make_svg_document, make_text_element, num

COLOURS = {
    "F": "#3465a4",
    "B": "#5c852c",
    "I": "#008b9a",
    "W": "#e28c05",
    "UNSHARD": "#75507b",
    "REDUCE_SCATTER": "#ef7878",
    "REDUCE_GRAD": "#be1414",
    "OFFLOAD": "#606060",
    "RELOAD": "#282828",
}
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, weights",
    "UNSHARD": "weights gathered",
    "REDUCE_SCATTER": "gradients so far reduced",
    "REDUCE_GRAD": "gradients reduced",
    "OFFLOAD": "activations to host memory",
    "RELOAD": "activations back",
}
WHITE = 255
IDLE = "#ececec"
PALEST = 0.62
"""Fraction of white in the colour of a rank's last stage."""

BAR, GAP, SIDE_BAR = 24, 5, 8
LEFT, RIGHT, TOP, BOTTOM = 58, 66, 62, 68
WIDEST, NARROWEST, LARGEST_UNIT = 2400, 620, 26
"""Pixels: WIDEST and NARROWEST bound all bars together, LARGEST_UNIT bounds the shortest bar."""
SMALLEST_DIGITS = 5
"""Smallest readable font size for microbatch numbers, in pixels; smaller numbers are omitted."""


def draw_svg(simulation: Simulation, title: str, caption: str, measured: Simulation | None = None) -> str:
    """Return an SVG document on white, with the measured timeline below every rank's row, if there is one."""
    picture = _Picture(simulation, title, caption, measured)
    width, height = max(picture.right_x, LEFT + NARROWEST) + RIGHT, picture.bottom_y + BOTTOM
    return make_svg_document(title, width, height, picture.draw_elements())


@attrs.define(eq=False)
class _Picture:
    """Layout of the picture: the scale of time in pixels, and the elements."""

    simulation: Simulation
    title: str
    caption: str
    measured: Simulation | None = None
    local_stage: list[int] = internal()
    stages_per_rank: int = internal()
    unit: float = internal()
    digits: float = internal()
    row: int = internal()  # pixels from one rank to the next

    def __attrs_post_init__(self) -> None:
        sides = bool(self.simulation.shard_bars) + 2 * bool(self.simulation.transfer_bars)
        self.row = BAR + GAP + (SIDE_BAR + 3) * sides
        self.row += (BAR + GAP) * (self.measured is not None)
        self.local_stage = index_stages_on_ranks(self.simulation.program.stage_to_rank)
        self.stages_per_rank = 1 + max(self.local_stage)
        lengths = self.simulation.end - self.simulation.start
        shortest = float(lengths[lengths > 0].min(initial=math.inf))
        self.unit = min(LARGEST_UNIT / shortest, WIDEST / (self.longest_makespan or 1.0))
        digits = len(str(max(1, self.simulation.program.microbatches) - 1))
        # A digit is 0.6 em wide in Helvetica: 1.55 em for as many digits as the longest number has leaves a margin.
        self.digits = min(11.0, 1.55 * (shortest * self.unit - 1.5) / digits)

    @property
    def longest_makespan(self) -> float:
        """Return the longer makespan: simulated or measured."""
        return max(self.simulation.makespan, self.measured.makespan if self.measured else 0.0)

    @property
    def right_x(self) -> float:
        """Return the x coordinate at which the bars end."""
        return LEFT + self.longest_makespan * self.unit

    @property
    def bottom_y(self) -> float:
        """Return the y coordinate at which the rows end."""
        return TOP + self.simulation.program.ranks * self.row

    def draw_elements(self) -> Iterator[str]:
        yield make_text_element(LEFT, 24, self.title, 15, attributes=BOLD_TEXT)
        yield make_text_element(LEFT, 43, self.caption, 12, GREY)
        yield make_text_element(self.right_x + 8, TOP - 7, "peak live", 10, GREY)
        for rank, live in enumerate(self.simulation.peak_activations):
            yield from self._draw_row(rank, live)
        yield from self._draw_axis()
        yield from self._draw_legend()

    def _draw_row(self, rank: int, live: int) -> Iterator[str]:
        y = TOP + rank * self.row
        bars = list(self.simulation.iterate_bars(rank))
        yield make_text_element(LEFT - 10, y + BAR / 2 + 4, f"rank {rank}", 12, attributes=END)
        yield f'<rect x="{LEFT}" y="{y}" width="{num(self.right_x - LEFT)}" height="{BAR}" fill="{IDLE}"/>'
        for bar in bars:
            yield from self._draw_bar(bar, y)
        side = y + BAR + 2
        if self.simulation.shard_bars:
            yield from (self._draw_side_bar(bar, side) for bar in self.simulation.shard_bars[rank])
            side += SIDE_BAR + 3
        for bar in self.simulation.transfer_bars[rank] if self.simulation.transfer_bars else ():
            yield self._draw_side_bar(bar, side + (SIDE_BAR + 3) * (bar.action.op == "RELOAD"))
        for first, last in _find_bars_of_overlaps(bars):
            x, width = LEFT + first.start * self.unit, (last.end - first.start) * self.unit
            yield (
                f'<rect x="{num(x)}" y="{y}" width="{num(width)}" height="{BAR}" rx="2" fill="none" stroke="{INK}" '
                'stroke-width="1.5"/>'
            )
        yield make_text_element(self.right_x + 8, y + BAR / 2 + 4, str(live), 11, GREY)
        if self.measured is not None:
            y += self.row - BAR - GAP
            yield make_text_element(LEFT - 10, y + BAR / 2 - 1, "measured", 10, GREY, attributes=END)
            for bar in self.measured.iterate_bars(rank):
                yield from self._draw_bar(bar, y - GAP)

    def _draw_bar(self, bar: Bar, y: float) -> Iterator[str]:
        x, width = LEFT + bar.start * self.unit, (bar.end - bar.start) * self.unit
        colour = self._choose_colour(bar.action.op, self.local_stage[bar.action.stage])
        yield (
            f'<rect x="{num(x)}" y="{y}" width="{num(width)}" height="{BAR}" fill="{_to_hex(colour)}" stroke="#fff" '
            f'stroke-width="0.8"><title>{bar.action}: {bar.start:g} to {bar.end:g}</title></rect>'
        )
        if self.digits >= SMALLEST_DIGITS:
            # 150 of 255 is where white text becomes hard to read; 0.36 em is half the height of a digit.
            brightness = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]
            ink, middle = "#fff" if brightness < 150 else INK, y + BAR / 2 + 0.36 * self.digits
            yield make_text_element(
                x + width / 2, middle, str(bar.action.microbatch), self.digits, ink, attributes=MIDDLE
            )

    def _draw_side_bar(self, bar: Bar, y: float) -> str:
        x, width = LEFT + bar.start * self.unit, max(2.0, (bar.end - bar.start) * self.unit)
        colour = self._choose_colour(bar.action.op, self.local_stage[bar.action.stage])
        return (
            f'<rect x="{num(x)}" y="{num(y)}" width="{num(width)}" height="{SIDE_BAR}" fill="{_to_hex(colour)}">'
            f"<title>{bar.action}: {bar.start:g} to {bar.end:g}</title></rect>"
        )

    def _choose_colour(self, op: str, local_stage: int) -> bytes:
        """Return an op's colour, paler for a rank's later stages."""
        way = PALEST * local_stage / max(1, self.stages_per_rank - 1)
        return bytes(round(part + way * (WHITE - part)) for part in bytes.fromhex(COLOURS[op][1:]))

    def _draw_axis(self) -> Iterator[str]:
        y = self.bottom_y + 3
        yield f'<path d="M{LEFT} {num(y)}H{num(self.right_x)}" stroke="{GREY}" stroke-width="0.8"/>'
        step = _round_up_axis_step(70 / self.unit)
        for number in range(math.floor(self.longest_makespan / step + 1e-9) + 1):
            x = LEFT + number * step * self.unit
            yield f'<path d="M{num(x)} {num(y)}v4" stroke="{GREY}" stroke-width="0.8"/>'
            yield make_text_element(x, y + 15, f"{number * step:g}", 10, GREY, attributes=MIDDLE)
        yield make_text_element(self.right_x + 8, y + 15, "time", 10, GREY)

    def _draw_legend(self) -> Iterator[str]:
        x, y = float(LEFT), self.bottom_y + 40
        done = {op for op, count in self.simulation.action_counts.items() if count}
        side_bars = *self.simulation.shard_bars, *self.simulation.transfer_bars
        done |= {bar.action.op for bars in side_bars for bar in bars}
        for op in filter(done.__contains__, NAMES):
            for local_stage in range(self.stages_per_rank):
                colour = _to_hex(self._choose_colour(op, local_stage))
                yield f'<rect x="{num(x)}" y="{num(y)}" width="13" height="13" fill="{colour}"/>'
                x += 15
            yield make_text_element(x + 3, y + 11, NAMES[op], 11.5)
            x += 24 + 6.2 * len(NAMES[op])
        if self.stages_per_rank > 1:
            yield make_text_element(
                x, y + 11, f"paler: the later of a rank's {self.stages_per_rank} stages", 11.5, GREY
            )


def _find_bars_of_overlaps(bars: list[Bar]) -> Iterator[tuple[Bar, Bar]]:
    """Yield the first and the last bar of every overlap."""
    for number, bar in enumerate(bars):
        if bar.overlaps_previous and (number + 1 == len(bars) or not bars[number + 1].overlaps_previous):
            first = next(back for back in range(number, -1, -1) if not bars[back].overlaps_previous)
            yield bars[first], bar


def _round_up_axis_step(least: float) -> float:
    """Return an axis step: the smallest 1, 2 or 5 times a power of ten not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


def _to_hex(colour: bytes) -> str:
    """Return a colour as text, such as `#1f77b4`."""
    return f"#{colour.hex()}"
