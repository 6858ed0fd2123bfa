"""Results of commands as JSON."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import PurePath
from typing import Any

import attrs

from drawloom.graph.cli.command import list_json_fields


def as_data(value: Any) -> Any:
    """Return a result, or a part, as data for JSON. Infinities and NaN become None."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case str() | int() | None:
            return value
        case PurePath() | date() | time():
            return str(value)
        case Mapping():
            return {str(key): as_data(part) for key, part in value.items()}
        case _ if attrs.has(type(value)):
            return {field.name: as_data(getattr(value, field.name)) for field in list_json_fields(type(value))}
        case Sequence() | Iterator():
            return [as_data(part) for part in value]
    return float(value)  # a number of numpy or torch; TypeError otherwise


def dump_json(data: Any) -> str:
    """Return a result, a part, or plain data as JSON with indentation, and null for infinities and NaN."""
    return json.dumps(as_data(data), indent=1, allow_nan=False)


def dump_json_line(data: Any) -> str:
    """Return data as JSON in one line, with all letters as they are, and null for infinities and NaN."""
    return json.dumps(as_data(data), ensure_ascii=False, allow_nan=False)
