"""What may have been meant by a value that has another type than the one expected."""

from collections.abc import Iterator
from typing import Any

import tomli

from drawloom.graph.toml import emit


def near_misses(value: Any) -> Iterator[tuple[Any, str]]:
    """Values of other types that it nearly is, each with the hint what to write then."""
    try:
        text = emit.dumps(value)
    except (TypeError, ValueError):  # no TOML
        return
    if isinstance(value, str):
        for bare in (value, value.lower()):
            yield from ((meant, f"write {bare} without quotes") for meant in _read(bare))
    elif not isinstance(value, list | dict):
        yield text, f"write {emit.dumps(text)}"
    if isinstance(value, float) and value.is_integer():
        yield int(value), f"write {int(value)}"
    if type(value) is int and value in (0, 1):
        yield bool(value), f"write {str(bool(value)).lower()}"
    if not isinstance(value, list):
        yield [value], f"write [{text}]"
    elif len(value) == 1:
        yield value[0], f"write {text[1:-1]} without brackets"


def _read(text: str) -> list[Any]:
    """The value that a text is in TOML, if it is one; what can't be printed is no part of a hint."""
    try:
        return [tomli.loads(f"x = {text}")["x"]] if text.isprintable() else []
    except (ValueError, RecursionError):
        return []
