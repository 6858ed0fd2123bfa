"""The points of a sweep: words `node.key=a,b,c` or `node.key=0..3` as a grid, each with a name and its words."""

import itertools
import re
from collections.abc import Iterator, Sequence

import attrs

from drawloom.graph import UserError
from drawloom.graph.recipe.overrides import read_overrides
from drawloom.graph.toml.emit import dumps

RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
MAX_POINTS = 10_000
MAX_NAME_LENGTH = 200  # file names have at most 255 bytes
OPENING, CLOSING, QUOTES = "[{(", "]})", "\"'"


@attrs.frozen
class Axis:
    """A key, and the texts of its values."""

    key: str
    values: list[str]


@attrs.frozen
class Point:
    """One run of a sweep: its name, from the values of the axes, and its words."""

    name: str
    words: list[str]


def points_of(words: Sequence[str]) -> list[Point]:
    """
    Return the grid over all words with several values; the last axis varies first.

    Words with one value apply to every point. Raises UserError if no word has several values, if a value is repeated,
    or if there are too many points.
    """
    axes, common = [], []
    for word in words:
        axis = _axis(word)
        if len(axis.values) > 1:
            axes.append(axis)
        else:
            common.append(word)
    if not axes:
        raise UserError("there is nothing to vary; write several values, such as optimizer.lr=1e-3,3e-4", 2)
    keys = [axis.key for axis in axes]
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise UserError(f"{repeated[0]} is given twice; write all of its values in one word", 2)
    points = [_point(axes, values, common) for values in _grid(axes)]
    names = [point.name for point in points]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two points of the sweep are named {repeated[0]}; write every value once", 2)
    return points


def _grid(axes: Sequence[Axis]) -> Iterator[tuple[str, ...]]:
    count = 1
    for axis in axes:
        count *= len(axis.values)
    if count > MAX_POINTS:
        raise UserError(
            f"the sweep has {count:,} points, and at most {MAX_POINTS:,} are possible; write fewer values", 2
        )
    return itertools.product(*(axis.values for axis in axes))


def _axis(word: str) -> Axis:
    key, _, text = word.partition("=")
    return Axis(key, [value for part in _split(text) for value in _expand_range(key, part)])


def _split(text: str) -> list[str]:
    """Split a text at the commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in QUOTES:
            quote = character
        else:
            depth += (character in OPENING) - (character in CLOSING)
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _expand_range(key: str, text: str) -> list[str]:
    """Return the whole numbers of a range such as 0..2, with both ends, or the text alone."""
    if not (match := RANGE.fullmatch(text.strip())):
        return [text.strip()]
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise UserError(f"{key}={text} is not a range; write the smaller number first, such as 0..2", 2)
    if last >= first + MAX_POINTS:
        count = f"{last - first + 1:,} values, and at most {MAX_POINTS:,} are possible"
        raise UserError(f"{key}={text} has {count}; write a shorter range", 2)
    return [str(number) for number in range(first, last + 1)]


def _point(axes: Sequence[Axis], values: Sequence[str], common: Sequence[str]) -> Point:
    keys = [axis.key for axis in axes]
    short = [key.rpartition(".")[2] for key in keys]
    labels = [last if short.count(last) == 1 else key for key, last in zip(keys, short, strict=True)]
    words = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
    name = ",".join(f"{label}={_plain(word)}" for label, word in zip(labels, words, strict=True))
    if len(name) > MAX_NAME_LENGTH:
        raise UserError(
            f"the name of the point {name[:40]}... is too long for a folder; write overlays with --overlay", 2
        )
    return Point(name, [*common, *words])


def _plain(word: str) -> str:
    """Return the value of a word as a part of a file name, equal for equal values: 1e-3 and 0.001 are 0.001."""
    value = read_overrides([word])
    while isinstance(value, dict) and len(value) == 1:
        [value] = value.values()
    text = value if isinstance(value, str) else dumps(value)
    return re.sub(r"[^\w.+-]+", "_", text)
