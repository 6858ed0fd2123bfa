"""What our SVG pictures are made of: text whose width is known beforehand, colours, paths, a frame."""

import colorsys
import html
from collections.abc import Iterable, Sequence

import attrs

INK, GREY = "#1a1a1a", "#6b6b6b"
FONT = "Helvetica, Arial, sans-serif"
BROADEST = 0.64
"""Of a letter's height: what a letter takes at most on average, in the broadest font that may stand in for ours."""
BOLD = 1.12


@attrs.frozen
class Colour:
    """One hue: `strong` for lines, `pale` for areas behind text."""

    strong: str
    pale: str


def colours(names: Sequence[str]) -> dict[str, Colour]:
    """A hue for each name, all round the circle; neighbours in the list are far apart in it."""
    stride = next(step for step in (5, 7, 11, 13, 1) if step == 1 or len(names) % step)
    hues = [(0.58 + stride * number / max(1, len(names))) % 1 for number in range(len(names))]
    return {name: Colour(_hex(hue, 0.40, 0.55), _hex(hue, 0.94, 0.60)) for name, hue in zip(names, hues, strict=True)}


def _hex(hue: float, lightness: float, saturation: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, lightness, saturation))


def width_of(text: str, size: float, *, bold: bool = False) -> float:
    """At most so many pixels, whatever the font."""
    return len(text) * size * BROADEST * (BOLD if bold else 1.0)


def text(x: float, y: float, words: str, size: float, colour: str = INK, more: str = "") -> str:
    """Words whose left end (or what `more` says by `text-anchor`) stands at x, on the line y."""
    return f'<text x="{n(x)}" y="{n(y)}" font-size="{n(size)}" fill="{colour}"{more}>{safe(words)}</text>'


BOLD_TEXT = ' font-weight="bold"'
MIDDLE = ' text-anchor="middle"'
END = ' text-anchor="end"'
HALO = ' stroke="#fff" stroke-width="3" stroke-linejoin="round" paint-order="stroke"'


def document(title: str, width: float, height: float, body: Iterable[str]) -> str:
    """An SVG document on white."""
    size = f'viewBox="0 0 {n(width)} {n(height)}" width="{n(width)}" height="{n(height)}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">',
        f"<title>{safe(title)}</title>",
        f'<rect width="{n(width)}" height="{n(height)}" fill="#fff"/>',
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def safe(words: str) -> str:
    """Words as XML; what XML can't hold at all becomes a question mark in a diamond."""
    return html.escape("".join(letter if letter.isprintable() else "\ufffd" for letter in words))


def n(number: float) -> str:
    """A number with at most one decimal."""
    return f"{round(number, 1):g}" if abs(number) < 1e5 else f"{number:.0f}"
