"""Reward for JSON that is valid under a schema."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drawloom.components.ports.rollouts import Answer
from drawloom.components.rewards.expected import Weighted
from drawloom.graph import component, setting

TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: not isinstance(value, bool) and isinstance(value, int | float) and value == int(value),
}

NOTES = frozenset({"$schema", "$id", "$comment", "title", "description", "default", "examples"})
"""Keywords without an effect on validity."""


def _describe_unsupported_schema(schema: Any) -> str | None:
    """Return the reason if `is_valid_under_schema` does not support a schema, else None."""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return f"{schema!r} is not a schema; write a table"
    if unknown := schema.keys() - KEYWORDS.keys() - NOTES - {"additionalProperties"}:
        return f"the keyword {min(unknown)!r} is not supported; use {', '.join(sorted(KEYWORDS))}"
    kinds = schema.get("type", [])
    if unknown := {*([kinds] if isinstance(kinds, str) else kinds)} - TYPES.keys():
        return f"{min(unknown)!r} is not a type; write one of {', '.join(TYPES)}"
    return next(filter(None, map(_describe_unsupported_schema, _list_direct_subschemas(schema))), None)


def _list_direct_subschemas(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas directly inside a schema."""
    members = [schema[key] for key in ("items", "not", "additionalProperties") if key in schema]
    members += [entry for key in ("anyOf", "allOf", "oneOf") for entry in schema.get(key, [])]
    return [*members, *schema.get("properties", {}).values()]


@component
class JsonSchema(Weighted):
    """1 for a completion that is JSON, with nothing before or after it, and valid under a schema; else 0."""

    json_schema: dict[str, Any] = setting(
        check=_describe_unsupported_schema, doc="JSON Schema; patterns are regular expressions of Python"
    )

    def scores(self, answers: Sequence[Answer]) -> list[float]:
        return [self._score_text(answer.text) for answer in answers]

    def _score_text(self, text: str) -> float:
        """Return 1 for a text with valid JSON, else 0."""
        try:
            value = json.loads(text, parse_constant=_refuse_nan_and_infinity)
        except (ValueError, RecursionError):
            return 0.0
        return float(is_valid_under_schema(value, self.json_schema))


def _refuse_nan_and_infinity(name: str) -> Any:
    """Raise ValueError for NaN and infinities, which JSON lacks."""
    raise ValueError(f"JSON has no number {name}")


def is_valid_under_schema(value: Any, schema: Any) -> bool:
    """Return whether a JSON value is valid under a schema, with the keywords in KEYWORDS."""
    if isinstance(schema, bool):
        return schema
    return all(KEYWORDS[key](value, argument) for key, argument in schema.items() if key in KEYWORDS) and (
        "additionalProperties" not in schema or _has_valid_undeclared_properties(value, schema)
    )


def _has_valid_undeclared_properties(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether an object's undeclared properties are valid under `additionalProperties`."""
    if not isinstance(value, dict):
        return True
    extras = value.keys() - schema.get("properties", {}).keys()
    return all(is_valid_under_schema(value[key], schema["additionalProperties"]) for key in extras)


def _has_json_type(value: Any, kinds: Any) -> bool:
    """Return whether a value has one of the JSON types `kinds`, a name or a list."""
    return any(TYPES[kind](value) for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _pass_values_of_other_types(kind: str, test: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Return a test for values with the JSON type `kind`; other values always pass, as JSON Schema defines it."""
    return lambda value, argument: not TYPES[kind](value) or test(value, argument)


def _are_equal_json_values(one: Any, other: Any) -> bool:
    """Compare JSON values: true is not 1, and 1.0 is 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_equal_json_values, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal_json_values(one[key], other[key]) for key in one)
    return bool(one == other)


KEYWORDS: Mapping[str, Callable[[Any, Any], bool]] = {
    "type": _has_json_type,
    "enum": lambda value, options: any(_are_equal_json_values(value, option) for option in options),
    "const": _are_equal_json_values,
    "properties": _pass_values_of_other_types(
        "object",
        lambda value, members: all(is_valid_under_schema(value[key], members[key]) for key in value.keys() & members),
    ),
    "required": _pass_values_of_other_types("object", lambda value, names: all(name in value for name in names)),
    "items": _pass_values_of_other_types(
        "array", lambda value, schema: all(is_valid_under_schema(entry, schema) for entry in value)
    ),
    "minItems": _pass_values_of_other_types("array", lambda value, least: len(value) >= least),
    "maxItems": _pass_values_of_other_types("array", lambda value, most: len(value) <= most),
    "minLength": _pass_values_of_other_types("string", lambda value, least: len(value) >= least),
    "maxLength": _pass_values_of_other_types("string", lambda value, most: len(value) <= most),
    "pattern": _pass_values_of_other_types("string", lambda value, pattern: re.search(pattern, value) is not None),
    "minimum": _pass_values_of_other_types("number", lambda value, least: value >= least),
    "maximum": _pass_values_of_other_types("number", lambda value, most: value <= most),
    "anyOf": lambda value, schemas: any(is_valid_under_schema(value, schema) for schema in schemas),
    "allOf": lambda value, schemas: all(is_valid_under_schema(value, schema) for schema in schemas),
    "oneOf": lambda value, schemas: sum(is_valid_under_schema(value, schema) for schema in schemas) == 1,
    "not": lambda value, schema: not is_valid_under_schema(value, schema),
}
