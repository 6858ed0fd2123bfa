"""One JSON Schema for all recipes: every component with its keys, whichever package it comes from."""

import inspect
from collections.abc import Iterable, Mapping

from drawloom.graph.inspect.listing import ports
from drawloom.graph.problems import Problem
from drawloom.graph.recipe.recipe import FORMAT, NAME
from drawloom.graph.registry.registry import Registry
from drawloom.graph.registry.spec import Field, Spec
from drawloom.graph.schema.types import VARIABLE, Schema, described, setting_schema
from drawloom.graph.types.port_match import implements

DIALECT = "http://json-schema.org/draft-07/schema#"
"""The newest that editors' TOML plugins read."""

NODE_NAME = f"^{NAME.pattern}$"

NODE: Schema = {"$ref": "#/definitions/node"}

_OTHER: Schema = {
    "properties": {"use": False},
    "additionalProperties": {"if": {"type": "object", "required": ["use"]}, "then": NODE},
}
"""What is laid over a node of another file, or a group of nodes."""

TABLE: Schema = {"type": "object", "if": {"required": ["use"]}, "then": NODE, "else": _OTHER, "anyOf": [NODE, True]}
"""A table at the top. Validators read `if`, and so name the key that is wrong; editors read `anyOf` to complete."""

REFERENCE: Schema = {"type": "string", "pattern": r"^@[A-Za-z]"}


def recipe_schema(catalogue: Registry, usual: Mapping[str, Iterable[str]] | None = None) -> Schema:
    """
    The schema of a recipe file.

    What is missing in a file may stand in another, so no setting is required. A table without `use` may lie over any
    node of another file, so all keys pass; those are offered that it can have by `usual`, names of nodes with the
    components that they use most often.
    """
    found = [catalogue.find(use) for use in catalogue.names()]
    specs = [spec for spec in found if not isinstance(spec, Problem)]
    node = {
        "type": "object",
        "required": ["use"],
        "properties": {"use": {"enum": [spec.use for spec in specs]}},
        "anyOf": [*map(_ref, specs), True],
        "allOf": [{"if": {"properties": {"use": {"const": spec.use}}}, "then": _ref(spec)} for spec in specs],
    }
    components = {spec.use: _component(spec, specs) for spec in specs}
    return {
        "$schema": DIALECT,
        "title": "A drawloom recipe",
        "type": "object",
        "properties": _directives() | {name: _usual(components, uses) for name, uses in (usual or {}).items()},
        "propertyNames": {"pattern": NODE_NAME},
        "additionalProperties": TABLE,
        "definitions": {"node": node} | components,
    }


def _usual(components: Mapping[str, Schema], uses: Iterable[str]) -> Schema:
    """A table that is most often one of these, but may be any."""
    known = [components[use] for use in uses if use in components]
    offered = [{"description": table["description"], "properties": table["properties"]} for table in known]
    return TABLE | {"anyOf": [*offered, *TABLE["anyOf"]]}


def _directives() -> Schema:
    names = {"type": "array", "items": {"type": "string"}}
    return {
        "format": {"const": FORMAT, "description": "the number of the recipe format; resolved recipes carry it"},
        "extends": {"anyOf": [{"type": "string"}, names], "description": "what this one is laid over, left to right"},
        "unset": names | {"description": "nodes and keys of the recipes below that are taken away"},
        "vars": {
            "type": "object",
            "additionalProperties": {"not": {"type": "object"}},
            "description": 'values that may stand more than once, as "$vars.name"',
        },
    }


def _ref(spec: Spec) -> Schema:
    return {"$ref": f"#/definitions/{spec.use}"}


def _component(spec: Spec, specs: list[Spec]) -> Schema:
    """A table that uses a component, with the keys that it has and no others."""
    doc = inspect.cleandoc(spec.cls.__doc__ or "")
    written = [field for field in spec.fields.values() if field.kind == "setting" or field.is_edge]
    keys = {field.name: _key(field, specs) for field in written}
    return {
        "type": "object",
        "title": spec.use,
        "description": doc,
        "properties": {"use": {"const": spec.use, "description": doc}} | keys,
        "required": ["use"],
        "additionalProperties": False,
    }


def _key(field: Field, specs: list[Spec]) -> Schema:
    if field.kind == "setting":
        return setting_schema(field.type, field.check) | described(field.doc, field.default)
    words = {"description": f"leads to {ports(field)}"}
    fitting = [spec for spec in specs if any(implements(spec.cls, port) for port in field.ports)]
    if field.kind not in ("list", "ordered", "mapping"):
        # Editors follow `properties` as deep as they lead, so here only the names are given of what may stand in place.
        names = {"use": {"enum": [spec.use for spec in fitting]}}
        return {"anyOf": [REFERENCE, VARIABLE, {"type": "object", "required": ["use"], "properties": names}]} | words
    target = {"anyOf": [REFERENCE, VARIABLE, *map(_ref, fitting)]}
    if field.kind == "mapping":
        return {"type": "object", "additionalProperties": target} | words
    return {"anyOf": [{"type": "array", "items": target}, VARIABLE]} | words
