"""Write plain values as TOML 1.0, each on one line."""

import json
import re
from datetime import date, datetime, time
from functools import partial
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPED = re.compile(r'["\\\x00-\x1f\x7f-\x9f]')
_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def dump_toml(plain: Any) -> str:
    """
    Return a value as TOML: str, bool, int, float, list or tuple, dict (an inline table), datetime, date or time.

    Raises TypeError for types missing in TOML (such as None), and ValueError for values not expressible in TOML: lone
    surrogates, UTC offsets with seconds, times with an offset.
    """
    match plain:
        case str():
            return _dump_string(plain)
        case bool():  # before int, its base class
            return "true" if plain else "false"
        case int():
            return int.__repr__(plain)  # not str: an IntEnum prints its name
        case float():
            return float.__repr__(plain)  # the shortest text that reads as the same number
        case list() | tuple():
            return f"[{', '.join(map(dump_toml, plain))}]"
        case dict():
            pairs = map("{} = {}".format, map(dump_key, plain), map(dump_toml, plain.values()))
            return f"{{ {', '.join(pairs)} }}" if plain else "{}"
        case datetime() | date() | time():
            return _dump_datetime(plain)
    raise TypeError(f"TOML can't express {plain!r}")


dump_canonical = partial(json.dumps, sort_keys=True, default=lambda moment: f"{type(moment).__name__} {moment}")
"""Return a text that is equal only for equal values: true is not 1, 1 is not 1.0, and the order of keys is ignored."""


def dump_key(name: str) -> str:
    """Return a key of a table, quoted if necessary."""
    return name if _BARE.fullmatch(name) else _dump_string(name)


def _dump_string(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"TOML can't express the lone surrogate in {text!r}") from error
    return f'"{_ESCAPED.sub(_escape, text)}"'


def _escape(match: re.Match[str]) -> str:
    return _SHORT.get(match[0]) or f"\\u{ord(match[0]):04X}"


def _dump_datetime(moment: date | time) -> str:
    if isinstance(moment, time) and moment.tzinfo is not None:
        raise ValueError(f"TOML can't express a time with an offset, {moment}")
    text = moment.isoformat()
    if isinstance(moment, datetime) and (offset := moment.utcoffset()) is not None and offset.total_seconds() % 60:
        raise ValueError(f"TOML can't express an offset of less than a minute, {text}")
    return text
