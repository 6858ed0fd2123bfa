"""The JSON Schema of recipes, for editors and validators."""

import inspect
import json
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import attrs

from drawloom.graph.component import Bound
from drawloom.graph.inspect.serialize import convert_to_toml_types
from drawloom.graph.recipe.layers import STARTED_IN
from drawloom.graph.recipe.merged import FORMAT, NAME
from drawloom.graph.registry.registry import Field, Registry, Spec
from drawloom.graph.types.assignable import union_members_except_none
from drawloom.graph.types.port_match import implements_any

Schema = dict[str, Any]

VARIABLE: Schema = {"type": "string", "pattern": r"^\$vars\."}
"""Schema of a variable, which may replace any whole value."""

TEXT = r"^([^@$]|@@|\$\$|$)"
"""Pattern of a literal string: neither a reference to a node nor a variable. A leading @ or $ is doubled."""

SIMPLE_TYPES: dict[Any, Schema] = {
    str: {"type": "string", "pattern": TEXT},
    Path: {"type": "string", "pattern": TEXT, "minLength": 1},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    Any: {},
    object: {},
    # TOML has types for these; tools that convert TOML to JSON write them as strings.
    datetime: {"type": "string", "format": "date-time"},
    date: {"type": "string", "format": "date"},
    time: {"type": "string", "format": "time"},
}


def make_setting_schema(kind: Any, check: Any = None) -> Schema:
    """Return a setting's schema: a value of its type, or a variable."""
    return {"anyOf": [make_value_schema(kind) | _make_bounds_schema(check), VARIABLE]}


def make_value_schema(kind: Any) -> Schema:
    """Return the schema for a type's literal values; their entries and items may be variables."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in SIMPLE_TYPES:
        return dict(SIMPLE_TYPES[kind])
    if origin is Literal:
        return {"enum": list(inner)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    if union_members_except_none(kind) != [kind]:
        return {"anyOf": [make_value_schema(member) for member in union_members_except_none(kind)]}
    if (origin or kind) in (list, tuple, Sequence):
        return _make_array_schema(origin, inner)
    if (origin or kind) in (dict, Mapping):
        return {"type": "object", "additionalProperties": make_setting_schema(inner[1]) if inner else {}}
    return _make_table_schema(kind) if attrs.has(kind) else {}


def _make_array_schema(origin: Any, inner: tuple[Any, ...]) -> Schema:
    if origin is tuple and inner[-1:] != (...,):
        items = [make_setting_schema(kind) for kind in inner]
        return {"type": "array", "items": items, "minItems": len(items), "maxItems": len(items)}
    return {"type": "array", "items": make_setting_schema(inner[0]) if inner else {}}


def _make_table_schema(cls: type) -> Schema:
    fields = [field for field in attrs.fields(attrs.resolve_types(cls)) if field.init]
    inside = {field.alias: _make_field_schema(field) for field in fields}
    required = [field.alias for field in fields if field.default is attrs.NOTHING]
    return {"type": "object", "properties": inside, "required": required, "additionalProperties": False}


def _make_field_schema(field: "attrs.Attribute[Any]") -> Schema:
    schema = make_setting_schema(field.type, field.metadata.get("check"))
    return schema | make_key_annotations(field.metadata.get("doc", ""), field.default)


def make_key_annotations(doc: str, default: Any) -> Schema:
    """Return a key's description and default, which editors show."""
    value = default.factory() if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]
    has_value = default is not attrs.NOTHING and value is not None
    return ({"description": doc} if doc else {}) | ({"default": _to_json(value)} if has_value else {})


def _to_json(value: Any) -> Any:
    """Convert a default to JSON. Values without a JSON form, such as infinity, become strings, as in TOML."""
    names = {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}
    return json.loads(json.dumps(convert_to_toml_types(value), default=str), parse_constant=names.get)


def _make_bounds_schema(check: Any) -> Schema:
    if not isinstance(check, Bound):
        return {}
    keys = {"minimum": check.at_least, "exclusiveMinimum": check.above, "exclusiveMaximum": check.below}
    return {key: bound for key, bound in keys.items() if bound is not None and math.isfinite(bound)}


DIALECT = "http://json-schema.org/draft-07/schema#"
"""The newest draft that TOML plugins for editors support."""

NODE_NAME = f"^{NAME.pattern}$"

NODE: Schema = {"$ref": "#/definitions/node"}

_OTHER: Schema = {
    "properties": {"use": False},
    "additionalProperties": {"if": {"type": "object", "required": ["use"]}, "then": NODE},
}
"""A table that is merged over a node in another file, or a group of nodes."""

TABLE: Schema = {"type": "object", "if": {"required": ["use"]}, "then": NODE, "else": _OTHER, "anyOf": [NODE, True]}
"""A top-level table. `if` lets validators name the wrong key; editors read `anyOf` for completion."""

EDITS: Schema = {
    "type": "object",
    "properties": {
        "remove": {"not": {"type": "object"}, "description": "elements of the list to remove"},
        "before": {"type": "object", "description": "elements to insert, keyed by the element that follows them"},
        "after": {"type": "object", "description": "elements to insert, keyed by the element that precedes them"},
    },
    "additionalProperties": {"$ref": "#/definitions/edits"},
}
"""Edits of a list, or of the lists in a grouped node. Without the recipe, the names can't be told apart."""

REFERENCE: Schema = {"type": "string", "pattern": r"^@[A-Za-z]"}


def make_recipe_schema(registry: Registry, common: Mapping[str, Iterable[str]] | None = None) -> Schema:
    """
    Return the schema for a recipe file.

    No setting is required, because another file may set it. A table without `use` may be merged over any node in
    another file, so all its keys are valid. Editors offer the keys of `common`: the components that nodes of this name
    often use.
    """
    specs = registry.specs()
    node = {
        "type": "object",
        "required": ["use"],
        "properties": {"use": {"enum": [spec.use for spec in specs]}},
        "anyOf": [*map(_make_schema_reference, specs), True],
        "allOf": [
            {"if": {"properties": {"use": {"const": spec.use}}}, "then": _make_schema_reference(spec)} for spec in specs
        ],
    }
    components = {spec.use: _make_component_schema(spec, specs) for spec in specs}
    return {
        "$schema": DIALECT,
        "title": "A drawloom recipe",
        "type": "object",
        "properties": _make_directives_schema()
        | {name: _make_any_keys_table_schema(components, uses) for name, uses in (common or {}).items()},
        "propertyNames": {"pattern": NODE_NAME},
        "additionalProperties": TABLE,
        "definitions": {"node": node, "edits": EDITS} | components,
    }


def _make_any_keys_table_schema(components: Mapping[str, Schema], uses: Iterable[str]) -> Schema:
    """Return the schema for a table with any keys. Editors offer the common components' keys for it."""
    schemas = [components[use] for use in uses if use in components]
    offers = [{"description": table["description"], "properties": table["properties"]} for table in schemas]
    return TABLE | {"anyOf": [*offers, *TABLE["anyOf"]]}


def _make_directives_schema() -> Schema:
    names = {"type": "array", "items": {"type": "string"}}
    return {
        "format": {"const": FORMAT, "description": "the version of the recipe format, written in resolved recipes"},
        STARTED_IN: {"type": "string", "description": "a lock file's folder for relative paths, where the run started"},
        "extends": {
            "anyOf": [{"type": "string"}, names],
            "description": "recipes that this one is merged over, left to right",
        },
        "unset": names | {"description": "nodes and keys to remove from the extended recipes"},
        "edit": {
            "type": "object",
            "additionalProperties": {"type": "object", "additionalProperties": {"$ref": "#/definitions/edits"}},
            "description": "edits of lists in the extended recipes, as in [edit.trainer.phases]",
        },
        "vars": {
            "type": "object",
            "additionalProperties": {"not": {"type": "object"}},
            "description": 'values to use several times, written "$vars.name"',
        },
    }


def _make_schema_reference(spec: Spec) -> Schema:
    return {"$ref": f"#/definitions/{spec.use}"}


def _make_component_schema(spec: Spec, specs: list[Spec]) -> Schema:
    """Return the schema for a component's node, with exactly the component's keys."""
    doc = inspect.cleandoc(spec.cls.__doc__ or "")
    fields = [field for field in spec.fields.values() if field.kind == "setting" or field.is_edge]
    keys = {field.name: _make_key_schema(field, specs) for field in fields}
    return {
        "type": "object",
        "title": spec.use,
        "description": doc,
        "properties": {"use": {"const": spec.use, "description": doc}} | keys,
        "required": ["use"],
        "additionalProperties": False,
    }


def _make_key_schema(field: Field, specs: list[Spec]) -> Schema:
    if field.kind == "setting":
        return make_setting_schema(field.type, field.check) | make_key_annotations(field.doc, field.default)
    description = {"description": f"edge to {field.target}"}
    fitting = [spec for spec in specs if implements_any(spec.cls, field.ports)]
    if field.kind not in ("list", "ordered", "mapping"):
        # Editors expand nested `properties` without limit, so inline nodes only list the names of components.
        names = {"use": {"enum": [spec.use for spec in fitting]}}
        return {
            "anyOf": [REFERENCE, VARIABLE, {"type": "object", "required": ["use"], "properties": names}]
        } | description
    target = {"anyOf": [REFERENCE, VARIABLE, *map(_make_schema_reference, fitting)]}
    if field.kind == "mapping":
        return {"type": "object", "additionalProperties": target} | description
    return {"anyOf": [{"type": "array", "items": target}, VARIABLE]} | description
