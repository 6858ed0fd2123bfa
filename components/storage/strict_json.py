"""Strict JSON: unambiguous parsing for untrusted files at a bounded cost."""

import json
from collections import Counter
from typing import Any


def parse_strict_json(text: bytes, *, max_values: int, infinities: bool = False) -> Any:
    """
    Parse a JSON text.

    Raises ValueError with the reason for invalid JSON, duplicate names in an object, NaN and infinities, and for more
    than `max_values` braces, brackets, commas and colons: a value may take some hundred bytes in memory. Python writes
    `Infinity` and `NaN`, which are numbers here only with `infinities`.
    """
    if (parts := sum(text.count(sign) for sign in b"{[,:")) > max_values:
        raise ValueError(f"it has {parts} values, above the limit of {max_values}")
    parse = float if infinities else _parse_finite_number
    try:
        return json.loads(
            text.decode(), object_pairs_hook=_build_dict_without_duplicates, parse_float=parse, parse_constant=parse
        )
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def _build_dict_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object as a dict. Raises ValueError for a repeated name."""
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"it has {next(name for name in value if counts[name] > 1)!r:.99} more than once")
    return value


def _parse_finite_number(text: str) -> float:
    """Return a number. Raises ValueError for NaN and infinities, also for too large numbers, such as 1e999."""
    if abs(number := float(text)) < float("inf"):  # False for NaN
        return number
    raise ValueError(f"{text:.99} is not a finite number")
