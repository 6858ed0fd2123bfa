"""Reward for JSON of a schema."""

from typing import Any

import jsonschema

from drawloom.components.rewards.json_schema import JsonSchema, is_valid_under_schema
from support.rewards import answer

SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": ["array", "null"], "items": {"enum": [1, "b", None, [True]]}, "minItems": 1, "maxItems": 2},
    {"anyOf": [{"type": "string", "pattern": "^b", "maxLength": 2}, {"type": "number", "minimum": 1, "maximum": 2}]},
    {"not": {"const": {"a": 1}}, "oneOf": [{"type": "object"}, {"required": ["a"]}]},
    {"allOf": [{"minLength": 1}, {"additionalProperties": {"type": "boolean"}}]},
    True,
    False,
]
VALUES: list[Any] = [
    {"a": 1}, {"a": 1.0}, {"a": 1.5}, {"a": True}, {"a": 1, "b": 2}, {}, [], [1], [1.0, True], [[True], None, 1], [[1]],
    None, "", "b", "bb", "bbb", "a", 1, 1.5, 3, True, {"b": False},
]  # fmt: skip


def test_schemas_are_those_of_jsonschema() -> None:
    """Every value is valid exactly where the package jsonschema finds it valid."""
    for schema in SCHEMAS:
        validator = jsonschema.Draft202012Validator(schema)
        for value in VALUES:
            assert is_valid_under_schema(value, schema) == validator.is_valid(value), (schema, value)


def test_only_json_without_more_text_is_right() -> None:
    """Text around JSON, NaN and nesting beyond the parser's depth are wrong."""
    reward = JsonSchema(json_schema={"type": ["object", "array", "number"]})
    texts = ('{"a": 1}', " [1]\n", 'x {"a": 1}', '{"a": 1', "NaN", "[" * 100_000, '"a"')
    assert reward.scores([answer(text) for text in texts]) == [1, 1, 0, 0, 0, 0, 0]
