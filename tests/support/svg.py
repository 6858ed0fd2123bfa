"""The content of an SVG, read back from its text, and from its pixels where cairosvg can draw them."""

import io
import xml.etree.ElementTree as ElementTree

import attrs
import numpy as np
import pytest

SVG = "{http://www.w3.org/2000/svg}"
LETTER = 0.6
"""The average width of a letter in a broad font, by its height."""


@attrs.frozen
class Words:
    """Words with their area (left, top, right, bottom) and their colour."""

    text: str
    area: tuple[float, float, float, float]
    colour: str


def parse(svg: str) -> ElementTree.Element:
    """Return the root element; raise an error if the text is not well formed."""
    return ElementTree.fromstring(svg)


def words(svg: str) -> list[Words]:
    """Return all words in the document's order, without the outlines behind them."""
    return [_words(element) for element in parse(svg).iter(f"{SVG}text") if element.attrib["fill"] != "none"]


def without_ink(svg: str) -> list[Words]:
    """Return words that are invisible in their own colour when the picture is drawn. Skip without Cairo."""
    try:
        import cairosvg
        from PIL import Image
    except (ImportError, OSError) as error:  # the library of the system may be missing
        pytest.skip(f"no picture can be drawn: {error}")
    scale = 2
    png = cairosvg.svg2png(bytestring=svg.encode(), scale=scale)
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    return [label for label in words(svg) if label.text and not _has_ink(label, pixels, scale)]


def _has_ink(label: Words, pixels: "np.ndarray[tuple[int, ...], np.dtype[np.int_]]", scale: int) -> bool:
    left, top, right, bottom = label.area
    height = bottom - top
    rows = slice(round(scale * (top + 0.2 * height)), round(scale * (bottom - 0.2 * height)))  # between lines beside it
    here = pixels[rows, round(scale * max(0.0, left)) : round(scale * right)]
    colour = np.array([*bytes.fromhex(label.colour.removeprefix("#"))])
    return bool((np.abs(here - colour).max(axis=-1) < 60).mean() > 0.02)


def outside(svg: str) -> list[Words]:
    """Return words that are not wholly inside the picture."""
    root = parse(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    return [label for label in words(svg) if not _within(label.area, width, height)]


def areas(svg: str) -> list[tuple[float, float, float, float]]:
    """Return the rectangles of a picture, without its background."""
    boxes = [{key: float(e.attrib.get(key, 0)) for key in ("x", "y", "width", "height")} for e in _rectangles(svg)]
    return [(box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]) for box in boxes]


def overlap(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    """Whether two areas share more than an edge."""
    return first[0] < second[2] and second[0] < first[2] and first[1] < second[3] and second[1] < first[3]


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
