"""Reward for JSON that is valid under a schema."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from drawloom import component, setting
from drawloom.components.rewards.expected import Weighted
from drawloom.ports import Answer


def _find_schema_fault(schema: dict[str, Any]) -> str | None:
    """Return the reason why a table is not a JSON Schema, else None; misspelt keywords are faults, too."""
    try:
        from jsonschema import Draft7Validator
        from jsonschema.exceptions import best_match
    except ImportError:  # reported by `needs`
        return None
    # without its id, the meta-schema's references lead to this stricter copy
    strict = {key: part for key, part in Draft7Validator.META_SCHEMA.items() if key != "$id"}
    members = {**strict["properties"], "$defs": strict["properties"]["definitions"]}
    errors = Draft7Validator({**strict, "properties": members, "additionalProperties": False}).iter_errors(schema)
    error = best_match(errors)
    return error and f"{'.'.join(map(str, error.absolute_path))}: {error.message}".removeprefix(": ")


@component(needs={"jsonschema": "drawloom[jsonschema]"})
class JsonSchema(Weighted):
    """1 for a completion that is JSON, with nothing before or after it, and valid under a schema; else 0."""

    json_schema: dict[str, Any] = setting(
        "JSON Schema (draft 7, and `$defs`) with `format`; patterns are regular expressions of Python",
        check=_find_schema_fault,
    )

    @cached_property
    def _validator(self) -> Any:
        from jsonschema import Draft7Validator

        return Draft7Validator(self.json_schema, format_checker=Draft7Validator.FORMAT_CHECKER)

    def scores(self, answers: Sequence[Answer]) -> list[float]:
        return [self._score_text(answer.text) for answer in answers]

    def _score_text(self, text: str) -> float:
        """Return 1 for a text with valid JSON, else 0."""
        try:
            return float(self._validator.is_valid(json.loads(text, parse_constant=_refuse_nan_and_infinity)))
        except (ValueError, RecursionError):
            return 0.0


def _refuse_nan_and_infinity(name: str) -> Any:
    """Raise ValueError for NaN and infinities, which JSON lacks."""
    raise ValueError(f"JSON has no number {name}")
