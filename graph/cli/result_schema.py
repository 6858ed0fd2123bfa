"""JSON Schemas for results, and for types of fields."""

import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal

import attrs

from drawloom.graph.cli.result import CommandFailure, Result, Schema, list_json_fields


def make_result_schema(command: str, classes: Sequence[type[Result]]) -> Schema:
    """Return a command's JSON Schema: a result, or an object with the key `error`."""
    failure = {"type": "object", "properties": {"error": make_type_schema(CommandFailure)}, "required": ["error"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"drawloom {command} --format json",
        "type": "object",
        "anyOf": [*(make_type_schema(cls) for cls in classes), failure | {"additionalProperties": False}],
    }


SIMPLE: dict[Any, Schema] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": ["number", "null"]},  # null stands for a number that is not finite
    type(None): {"type": "null"},
    Any: {},
}


def make_type_schema(kind: Any) -> Schema:
    """Return the schema for a field's type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in SIMPLE:
        return dict(SIMPLE[kind])
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [make_type_schema(member) for member in inner]}
    if isinstance(kind, type) and issubclass(kind, PurePath):
        return {"type": "string"}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": make_type_schema(inner[1])}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return _make_array_schema(origin, inner)
    if attrs.has(kind):
        return _make_object_schema(kind)
    raise TypeError(f"a field of a Result can't have the type {kind}; see Result for the supported types")


def _make_array_schema(origin: type, inner: tuple[Any, ...]) -> Schema:
    if origin is tuple and inner[-1] is not Ellipsis:
        items = [make_type_schema(part) for part in inner]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
    return {"type": "array", "items": make_type_schema(inner[0])}


def _make_object_schema(cls: type) -> Schema:
    hints = typing.get_type_hints(cls)
    fields = {field.name: field.metadata["doc"] for field in list_json_fields(cls)}
    return {
        "type": "object",
        "description": inspect.cleandoc(cls.__doc__ or ""),
        "properties": {
            name: make_type_schema(hints[name]) | ({"description": doc} if doc else {}) for name, doc in fields.items()
        },
        "required": list(fields),
        "additionalProperties": False,
    }
