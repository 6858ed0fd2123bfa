"""Problems with values of settings: the faulty part, the reason, and a hint."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import attrs
from cattrs import BaseValidationError, ForbiddenExtraKeysError
from cattrs.errors import AttributeValidationNote, IterableValidationNote

from drawloom.graph.problems import KeyPath, Problem, did_you_mean
from drawloom.graph.spelling import find_nearest
from drawloom.graph.toml.emit import dump_key, dump_toml
from drawloom.graph.types.assignable import union_members_except_none
from drawloom.graph.types.choices import MismatchError, is_choice, pair_toml_values_with_choices
from drawloom.graph.types.describe import MAX_VALUE_LENGTH, find_near_misses_with_hints, format_expected_type

Convert = Callable[[Any, Any], Any]
"""Function to convert a value to a type. It raises MismatchError or BaseValidationError."""


def iterate_problems(convert: Convert, error: Exception, path: KeyPath) -> Iterator[Problem]:
    """
    Flatten the exception tree from cattrs into problems.

    The note of an exception is one step of the path below `path`: cattrs's notes are subclasses of str, with the
    attribute's name or the item's index. `convert` tries corrected values for a hint.
    """
    note = next((note for note in getattr(error, "__notes__", ()) if type(note) is not str), None)
    if isinstance(note, AttributeValidationNote):
        path = (*path, note.name.lstrip("_"))
    elif isinstance(note, IterableValidationNote):
        path = (*path, note.index)
    if isinstance(error, BaseValidationError):
        for inner in error.exceptions:
            yield from iterate_problems(convert, inner, path)
    elif isinstance(error, MismatchError):
        yield Problem(
            "DL303", str(error), "" if error.reason else _find_hint(convert, error.value, error.kind), path=path
        )
    elif isinstance(error, ForbiddenExtraKeysError):
        known = [field.alias for field in attrs.fields(error.cl) if field.init]
        for name in sorted(error.extra_fields):
            yield Problem("DL303", "unknown key", did_you_mean(name, known), path=(*path, name))
    elif isinstance(error, KeyError) and note and error.args == path[-1:]:  # a required key of an attrs class
        hint = f"write {dump_key(error.args[0])} = ..."
        yield Problem("DL303", f"missing, {format_expected_type(note.type)}", hint, path=path)
    elif isinstance(error, ValueError | TypeError) and not note:
        yield Problem("DL303", str(error), path=path)  # raised by the attrs class itself
    else:
        raise error


def _find_hint(convert: Convert, value: Any, kind: Any) -> str:
    """Return a hint for a wrongly typed value: a near miss with the right type, or the nearest choice."""
    for candidate, hint in find_near_misses_with_hints(value):
        with suppress(MismatchError, BaseValidationError):
            convert(candidate, kind)
            return hint if len(hint) <= 2 * MAX_VALUE_LENGTH else ""
    words = [
        plain
        for member in union_members_except_none(kind)
        if is_choice(member)
        for plain, _ in pair_toml_values_with_choices(member)
        if isinstance(plain, str)
    ]
    near = find_nearest(value, words) if isinstance(value, str) else None
    return "" if near is None else f"did you mean {dump_toml(near)}?"
