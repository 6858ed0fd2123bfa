"""What an SVG shows, read back from its text, and from its pixels where cairosvg can draw them."""

import io
import xml.etree.ElementTree as ElementTree

import attrs
import numpy as np
import pytest

SVG = "{http://www.w3.org/2000/svg}"
LETTER = 0.6
"""Of a letter's height: what it takes on average, in a broad font."""


@attrs.frozen
class Words:
    """Words with the area on which they stand: left, top, right, bottom; and their colour."""

    text: str
    area: tuple[float, float, float, float]
    colour: str


def parse(svg: str) -> ElementTree.Element:
    """The root element; an error if it is not well formed."""
    return ElementTree.fromstring(svg)


def words(svg: str) -> list[Words]:
    """All words, in the order of the document, without the outlines behind them."""
    return [_words(element) for element in parse(svg).iter(f"{SVG}text") if element.attrib["fill"] != "none"]


def without_ink(svg: str) -> list[Words]:
    """Words of which nothing can be seen in their own colour when the picture is drawn. Skips without Cairo."""
    try:
        import cairosvg
        from PIL import Image
    except (ImportError, OSError) as error:  # the library of the system may be missing
        pytest.skip(f"no picture can be drawn: {error}")
    scale = 2
    png = cairosvg.svg2png(bytestring=svg.encode(), scale=scale)
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    return [one for one in words(svg) if one.text and not _has_ink(one, pixels, scale)]


def _has_ink(one: Words, pixels: "np.ndarray[tuple[int, ...], np.dtype[np.int_]]", scale: int) -> bool:
    left, top, right, bottom = one.area
    height = bottom - top
    rows = slice(round(scale * (top + 0.2 * height)), round(scale * (bottom - 0.2 * height)))  # between lines beside it
    here = pixels[rows, round(scale * max(0.0, left)) : round(scale * right)]
    colour = np.array([*bytes.fromhex(one.colour.removeprefix("#"))])
    return bool((np.abs(here - colour).max(axis=-1) < 60).mean() > 0.02)


def outside(svg: str) -> list[Words]:
    """Words that do not stand wholly in the picture."""
    root = parse(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    return [one for one in words(svg) if not _within(one.area, width, height)]


def areas(svg: str) -> list[tuple[float, float, float, float]]:
    """The rectangles of a picture, but for its ground."""
    found = [{key: float(e.attrib.get(key, 0)) for key in ("x", "y", "width", "height")} for e in _rectangles(svg)]
    return [(one["x"], one["y"], one["x"] + one["width"], one["y"] + one["height"]) for one in found]


def overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether two areas have more than an edge in common."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _rectangles(svg: str) -> list[ElementTree.Element]:
    return list(parse(svg).iter(f"{SVG}rect"))[1:]


def _words(element: ElementTree.Element) -> Words:
    x, y, size = (float(element.attrib[key]) for key in ("x", "y", "font-size"))
    text = element.text or ""
    width = len(text) * size * LETTER
    left = x - width * {"middle": 0.5, "end": 1.0}.get(element.attrib.get("text-anchor", ""), 0.0)
    return Words(text, (left, y - size, left + width, y + size / 4), element.attrib["fill"])


def _within(area: tuple[float, float, float, float], width: float, height: float) -> bool:
    left, top, right, bottom = area
    return left >= 0 and top >= 0 and right <= width and bottom <= height
