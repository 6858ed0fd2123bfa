"""Checks of the values that keys of a `config.json` may have."""

import math
from collections.abc import Callable
from types import UnionType
from typing import Any, get_args

import attrs


@attrs.frozen
class KeyValues:
    """Valid values of a key, described in words."""

    description: str
    is_valid: Callable[[Any], bool]


def is_finite_number(value: Any) -> bool:
    """Return whether a value is a finite number; bools are not numbers."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


BOOL = KeyValues("true or false", lambda value: type(value) is bool)
SIZE = KeyValues("int above 0", lambda value: type(value) is int and value > 0)
COUNT = KeyValues("int of 0 or more", lambda value: type(value) is int and value >= 0)
POSITIVE = KeyValues("float above 0", lambda value: is_finite_number(value) and value > 0)
COEFFICIENT = KeyValues("float of 0 or more", lambda value: is_finite_number(value) and value >= 0)
LAYER_NUMBERS = KeyValues(
    "a list of layers' numbers",
    lambda value: type(value) is list and all(type(number) is int and number >= 0 for number in value),
)

BY_TYPE = {bool: BOOL, int: SIZE, float: POSITIVE}


def create_word_list_check(*words: str) -> KeyValues:
    """Return a check for lists in which every element is one of these words."""
    text = f"a list of {' and '.join(words)}"
    return KeyValues(text, lambda value: type(value) is list and all(word in words for word in value))


def declare_config_key(values: KeyValues, default: Any = attrs.NOTHING) -> Any:
    """Return an attrs field for a config key with a check; a list becomes a tuple if the default is a tuple."""
    converter = tuple if isinstance(default, tuple) else None
    return attrs.field(default=default, metadata={"values": values}, converter=converter)


def find_key_check(field: "attrs.Attribute[Any]") -> KeyValues:
    """Return the check for a config field: its own from `declare_config_key`, or the default check for its type."""
    if own := field.metadata.get("values"):
        return own  # type: ignore[no-any-return]
    kind: Any = field.type
    kinds = [part for part in get_args(kind) if part is not type(None)] if isinstance(kind, UnionType) else [kind]
    return BY_TYPE[kinds[0]]
