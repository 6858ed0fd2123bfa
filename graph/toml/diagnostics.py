"""Faults of TOML told as a person sees them: where they began, and what was meant, rather than where tomli gave up."""

import re
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import tomli

from drawloom.graph.toml.positions import KeyPath, SourceMap

MARK = "\x00mark"
"""A key that no text can hold as a bare key: it shows into which table the next line would go."""

TRIES = 20
"""Quotes that are tried as the beginning of a string without end; more would be slow in a large text."""


def explain_fault(text: str, error: tomli.TOMLDecodeError) -> tuple[str, int, str]:
    """What is wrong, at which offset of the text, and a hint."""
    word = re.match(r"[A-Za-z]+", text[error.pos :])
    if error.msg == "Invalid value" and word and word[0] in ("True", "False", "None", "null"):
        meant = "leave the key out: TOML has no such value" if word[0][0] in "Nn" else f"write {word[0].lower()}"
        return f"{word[0]} is no value of TOML", error.pos, meant
    if (error.msg == "Cannot overwrite a value" or error.msg.endswith("twice")) and (twice := _twice(text, error)):
        return twice
    if error.msg == "Unterminated string" or error.msg in ('Expected "\'"', "Expected \"'''\"", 'Expected \'"""\''):
        return "a string that does not end", _opening(text, error.pos), "close it with the quotes that open it"
    return f"this is not TOML: {error.msg}", error.pos, _meant(text, error.pos)


def _meant(text: str, at: int) -> str:
    """What to write instead of a letter that can't stand where it stands."""
    letter = text[at : at + 1]
    if letter == ":" or text.startswith("---", at - 3):
        return "TOML writes key = value, below a [table]"
    if letter == "{":
        return "this looks like JSON; TOML writes key = value, below a [table]"
    if letter > "\x7f":
        return f"{letter!a} is {unicodedata.name(letter, 'no letter')}; such letters need quotes around them"
    return ""


def _twice(text: str, error: tomli.TOMLDecodeError) -> tuple[str, int, str] | None:
    """A key or table that stands there already: where it is set again, and, in the hint, where it was set first."""
    start = text.rfind("\n", 0, error.pos) + 1
    before, line = text[:start], text[start:].partition("\n")[0]
    path: KeyPath = next(_paths(line, before), ())
    places = SourceMap(before)
    first = places.key(path) or places.value(path) if path else None
    if first is None:
        return None
    return f"{path[-1]!r} is set twice", start, f"it is set on line {places.position(first.start)[0]} already"


def _paths(line: str, before: str) -> Iterator[KeyPath]:
    """The whole path of the key that a line sets, when it can be told from the line alone."""
    with suppress(tomli.TOMLDecodeError, RecursionError, ValueError):
        if header := re.match(r"\s*\[\[?(.*?)\]", line):
            yield tuple(_only(tomli.loads(f"[{header[1]}]")))
            return
        here = tuple(_only(tomli.loads(f'{before}\n"\\u0000mark" = 0'), MARK))[:-1]
        key = line.partition("=")[0]
        yield (*here, *_only(tomli.loads(f"{key} = 0")))


def _only(tree: Any, mark: str = "") -> Iterator[str | int]:
    """The way down a tree: to the mark, if there is one, or else through tables of one key."""
    trail: list[tuple[KeyPath, Any]] = [((), tree)]
    while trail:
        path, item = trail.pop()
        inside: list[tuple[str | int, Any]] = list(
            item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
        )
        if (path and path[-1] == mark) or (not mark and not inside):
            yield from path
            return
        trail += [((*path, key), part) for key, part in inside]


def _opening(text: str, end: int) -> int:
    """Where a string begins that does not end: the last quotes before which all is well."""
    for found in list(re.finditer(r"\"\"\"|'''|[\"']", text[:end]))[: -TRIES - 1 : -1]:
        if _is_well(f'{text[: found.start()]}""'):
            return found.start()
    return end


def _is_well(text: str) -> bool:
    """Whether a text is TOML, or would be if it went on."""
    try:
        tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        return error.pos >= len(text)
    except (RecursionError, ValueError):
        return False
    return True
