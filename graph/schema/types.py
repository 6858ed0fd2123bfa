"""The JSON Schema of what a recipe may write for a setting of a type."""

import json
import typing
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import attrs

from drawloom.graph.bounds import Bound
from drawloom.graph.types.describe import members
from drawloom.graph.types.structure import Values

Schema = dict[str, Any]

VARIABLE: Schema = {"type": "string", "pattern": r"^\$vars\."}
"""A variable may stand for any value as a whole."""

TEXT = r"^([^@$]|@@|\$\$|$)"
"""A string that is meant as such: not the name of a node, nor of a variable."""

SIMPLE: dict[Any, Schema] = {
    str: {"type": "string", "pattern": TEXT},
    Path: {"type": "string", "pattern": TEXT, "minLength": 1},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    Any: {},
    object: {},
    # TOML has types of its own for these; who turns TOML into JSON writes them as strings.
    datetime: {"type": "string", "format": "date-time"},
    date: {"type": "string", "format": "date"},
    time: {"type": "string", "format": "time"},
}


def setting_schema(kind: Any, check: Any = None) -> Schema:
    """What may stand for a setting: a value of its type, or a variable."""
    return {"anyOf": [type_schema(kind) | _bounds(check), VARIABLE]}


def type_schema(kind: Any) -> Schema:
    """What may be written for a type; where a part of it may be a variable, too."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in SIMPLE:
        return dict(SIMPLE[kind])
    if origin is Literal:
        return {"enum": list(inner)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    if members(kind) != [kind]:
        return {"anyOf": [type_schema(member) for member in members(kind)]}
    if (origin or kind) in (list, tuple, Sequence):
        return _array(origin, inner)
    if (origin or kind) in (dict, Mapping):
        return {"type": "object", "additionalProperties": setting_schema(inner[1]) if inner else {}}
    return _table(kind) if attrs.has(kind) else {}


def _array(origin: Any, inner: tuple[Any, ...]) -> Schema:
    if origin is tuple and inner[-1:] != (...,):
        items = [setting_schema(kind) for kind in inner]
        return {"type": "array", "items": items, "minItems": len(items), "maxItems": len(items)}
    return {"type": "array", "items": setting_schema(inner[0]) if inner else {}}


def _table(cls: type) -> Schema:
    fields = [field for field in attrs.fields(attrs.resolve_types(cls)) if field.init]
    inside = {field.alias: _field(field) for field in fields}
    required = [field.alias for field in fields if field.default is attrs.NOTHING]
    return {"type": "object", "properties": inside, "required": required, "additionalProperties": False}


def _field(field: "attrs.Attribute[Any]") -> Schema:
    schema = setting_schema(field.type, field.metadata.get("check"))
    return schema | described(field.metadata.get("doc", ""), field.default)


def described(doc: str, default: Any) -> Schema:
    """What an editor shows of a key: its line of documentation, and its default."""
    made = default.factory() if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]
    known = default is not attrs.NOTHING and made is not None
    return ({"description": doc} if doc else {}) | ({"default": _as_json(made)} if known else {})


def _as_json(value: Any) -> Any:
    """A default as JSON; what that has no form for as text."""
    return json.loads(json.dumps(Values.unstructure(value), default=str))


def _bounds(check: Any) -> Schema:
    if not isinstance(check, Bound):
        return {}
    keys = {"minimum": check.at_least, "exclusiveMinimum": check.above, "exclusiveMaximum": check.below}
    return {key: bound for key, bound in keys.items() if bound is not None}
