"""Choices of a Literal or an Enum, and the error for a value without a place in its type."""

import typing
from enum import Enum
from typing import Any, Literal


def is_literal(kind: Any) -> bool:
    """Return whether a type is a Literal."""
    return typing.get_origin(kind) is Literal


def is_choice(kind: Any) -> bool:
    """Return whether a type is a Literal or an Enum."""
    return is_literal(kind) or (isinstance(kind, type) and issubclass(kind, Enum))


def pair_toml_values_with_choices(kind: Any) -> list[tuple[Any, Any]]:
    """Return Enum members or Literal choices as (TOML value, member)."""
    if is_literal(kind):
        return [(choice, choice) for choice in typing.get_args(kind)]
    return [(member.value, member) for member in kind]


class MismatchError(ValueError):
    """A value of another type than `kind`, or with the right type but invalid for a reason."""

    def __init__(self, value: Any, kind: Any, reason: str = "", expected: str = "", got: str = "") -> None:
        super().__init__()
        self.value, self.kind, self.text, self.expected, self.got = value, kind, reason, expected, got
        self.reason = reason or expected or got

    def __str__(self) -> str:
        from drawloom.graph.types.describe import describe, format_expected_type  # few recipes have problems

        expected = self.expected or format_expected_type(self.kind)
        return self.text or f"{expected}, got {self.got or describe(self.value)}"
