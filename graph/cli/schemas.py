"""JSON Schemas for commands' arguments and results, and the words for arguments by name, for agents."""

import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal

import attrs

from drawloom.graph.cli.arguments import list_arguments
from drawloom.graph.cli.command import INVALID, Command, CommandFailure, Schema, find_result_classes, list_json_fields
from drawloom.graph.cli.main import load_command
from drawloom.graph.problems import UserError
from drawloom.graph.project import Project


def read_result_schema(project: Project, name: str) -> Schema:
    """
    Return the JSON Schema for a command with `--format json`: a result, or an object with the key `error`.

    Raises UserError for an unknown command, or for a server: its output is a protocol.
    """
    if not (classes := find_result_classes(load_command(project, name).run)):
        raise UserError(
            f"{name} is a server and has no result that a schema could describe; name another command", INVALID
        )
    failure = {"type": "object", "properties": {"error": make_type_schema(CommandFailure)}, "required": ["error"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"drawloom {name} --format json",
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


def make_arguments_schema(cls: type[Command]) -> Schema:
    """Return the JSON Schema for a command's arguments by name; `words` has the overrides."""
    properties: Schema = {}
    for argument in list_arguments(cls):
        kind = str if argument.parse else argument.kind
        schema = make_type_schema(Sequence[kind] if argument.is_list or argument.separator else kind)  # type: ignore[valid-type]
        properties[argument.field] = schema | {"description": argument.help}
    if cls.accepts_words:
        doc = "values over the recipe's, such as trainer.steps=10"
        properties["words"] = make_type_schema(Sequence[str]) | {"description": doc}
    required = [argument.field for argument in list_arguments(cls) if argument.default is attrs.NOTHING]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def format_words(cls: type[Command], values: Mapping[str, Any]) -> list[str]:
    """Return a command line's words for arguments by name, as `make_arguments_schema` describes them."""
    positional, options = [], []
    for argument in list_arguments(cls):
        value, name = values.get(argument.field), argument.option
        items = [*map(str, value)] if isinstance(value, list) else [str(value)]
        if value is None or value is False:
            continue
        if argument.positional:
            positional += items
        elif value is True:
            options.append(name)
        elif argument.nargs:
            options += [name, *items]
        else:
            options += [
                f"{name}={item}" for item in ([argument.separator.join(items)] if argument.separator else items)
            ]
    return [*positional, *options, *values.get("words", ())]
