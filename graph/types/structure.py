"""
Strict conversion of TOML values to the types of settings, by cattrs. All problems with a value are reported at once.
"""

import math
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
from cattrs import BaseValidationError, Converter
from cattrs.cols import list_structure_factory, mapping_structure_factory
from cattrs.errors import IterableValidationError, IterableValidationNote
from cattrs.gen import make_dict_structure_fn, override

from drawloom.graph.component import Check
from drawloom.graph.problems import Problem
from drawloom.graph.types.assignable import union_members_except_none
from drawloom.graph.types.choices import MismatchError, is_choice, is_literal, pair_toml_values_with_choices

Hook = Callable[[Any, Any], Any]


class ValueConverter:
    """
    Converter of values from tomli to the annotated types of component fields.

    Supported types are str, bool, int, float, Path, datetime, date, time, Literal, Enum (by value), list, tuple,
    Sequence, dict, Mapping, attrs classes, unions of these, and Any. Other types raise TypeError, because the component
    is wrong and not the recipe.
    """

    def structure(self, value: Any, kind: Any, check: Check | None = None) -> tuple[Any, list[Problem]]:
        """Convert a value to `kind`. Return (value, []), or (None, problems), where `path` leads to the faulty part."""
        if (
            type(value) is kind
            and kind in (str, bool, int, float)
            and not check
            and not _explain_invalid_value(value, kind)
        ):
            return value, []  # the fast path of most settings
        try:
            hook = self._make_checking_hook(check) if check else self.convert
            return hook(value, kind), []
        except (MismatchError, BaseValidationError) as error:
            from drawloom.graph.types.mismatches import iterate_problems  # few recipes have problems

            return None, list(iterate_problems(self.convert, error, ()))

    def convert(self, value: Any, kind: Any) -> Any:
        """Convert a value to `kind`. Raises MismatchError or BaseValidationError for a value of another type."""
        return self._converter.get_structure_hook(kind)(value, kind)

    def _make_checking_hook(self, check: Check) -> Hook:
        """Return a hook for converting a value and then rejecting it if `check` returns a reason."""

        def structure(value: Any, kind: Any) -> Any:
            result = self.convert(value, kind)
            if reason := check(result):
                raise MismatchError(value, kind, reason)
            return result

        return structure

    @cached_property
    def _converter(self) -> Converter:
        """Converter with a hook per type. cattrs tries registered classes first, then the newest matching predicate."""
        # Detailed validation collects the errors of all items instead of raising the first.
        converter = Converter(detailed_validation=True)
        # Registered first, so tried last: otherwise cattrs would guess for unknown types.
        converter.register_structure_hook_factory(lambda kind: True, _raise_unsupported_type)
        converter.register_structure_hook_func(lambda kind: kind in (Any, object), lambda value, kind: value)
        converter.register_structure_hook_func(is_literal, _structure_choice)
        converter.register_structure_hook_func(
            lambda kind: union_members_except_none(kind) != [kind], self._structure_union
        )
        converter.register_structure_hook_func(lambda kind: _get_origin_or_type(kind) is tuple, self._structure_tuple)
        converter.register_structure_hook_factory(_is_variable_length_array, _make_array_hook)
        converter.register_structure_hook_factory(
            lambda kind: _get_origin_or_type(kind) in (dict, Mapping), _make_mapping_hook
        )
        converter.register_structure_hook_factory(attrs.has, self._make_class_hook)
        for kind in (str, bytes, bool, int, float, Path, date, time, Enum):  # and their subclasses
            converter.register_structure_hook(kind, _structure_scalar)
        return converter

    def _structure_union(self, value: Any, kind: Any) -> Any:
        """Convert a value to the first accepting member type, int before float. Otherwise raise the closest error."""
        if value is None and type(None) in typing.get_args(kind):
            return None
        inside: list[Exception] = []
        # float last: it accepts integers, which an int member should keep.
        for member in sorted(union_members_except_none(kind), key=lambda member: member is float):
            try:
                return self.convert(value, member)
            except MismatchError as error:
                inside += [error] if error.reason else []
            except BaseValidationError as error:
                inside.append(error)
        raise inside[0] if len(inside) == 1 else MismatchError(value, kind)

    def _structure_tuple(self, value: Any, kind: Any) -> tuple[Any, ...]:
        kinds = typing.get_args(kind)
        if not isinstance(value, list):
            raise MismatchError(value, kind)
        if len(value) != len(kinds):
            raise MismatchError(value, kind, got=f"{len(value)} item{'' if len(value) == 1 else 's'}")
        items, errors = [], []
        for index, (item, item_kind) in enumerate(zip(value, kinds, strict=True)):
            try:
                items.append(self.convert(item, item_kind))
            except (MismatchError, BaseValidationError) as error:
                error.add_note(IterableValidationNote("", index, item_kind))
                errors.append(error)
        if errors:
            raise IterableValidationError("", errors, kind)
        return tuple(items)

    def _make_class_hook(self, kind: type, converter: Converter) -> Hook:
        """Return a hook for a table with exactly the fields of an attrs class, each with its own check."""
        checks = {field.name: check for field in attrs.fields(kind) if (check := field.metadata.get("check"))}
        checked: dict[str, Any] = {
            name: override(struct_hook=self._make_checking_hook(checks[name])) for name in checks
        }
        inside: Hook = make_dict_structure_fn(
            kind, converter, _cattrs_forbid_extra_keys=True, _cattrs_use_alias=True, **checked
        )
        return _make_container_hook(dict, inside)


CONVERTER = ValueConverter()
"""Shared by all graphs, because it makes a hook for a type once."""

SCALARS = (str, bool, int, float, Path, datetime, date, time)

MAX_FILE_NAME_BYTES = 255
"""Limit for a file's or a folder's name in all usual file systems."""


def _structure_scalar(value: Any, kind: Any) -> Any:
    if is_choice(kind):
        return _structure_choice(value, kind)
    if kind not in SCALARS:
        return _raise_unsupported_type(kind)
    if type(value) not in {Path: (str,), float: (float, int)}.get(kind, (kind,)):
        raise MismatchError(value, kind)
    if objection := _explain_invalid_value(value, kind):
        raise MismatchError(value, kind, expected=objection)
    return kind(value) if kind in (Path, float) else value


def _explain_invalid_value(value: Any, kind: Any) -> str:
    """Return why a value is invalid although it has the expected TOML type. Empty if it is valid."""
    if type(value) is str and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        return "expected text without lone surrogates"
    if type(value) is int and not -(2**63) <= value < 2**63:
        return "expected an integer of at most 64 bits"
    if kind is float and not math.isfinite(value):
        return "expected a finite number"
    if kind is float and float(value) != value:
        return "expected a number that a float represents exactly"
    if kind is Path and value.startswith("~"):
        return "expected the path in full, because only a shell expands ~"
    if kind is Path and (not value or "\0" in value or "\n" in value):
        return "expected a path without newline and NUL" if value else "expected a path"
    if kind is Path and max(len(os.fsencode(part)) for part in value.split("/")) > MAX_FILE_NAME_BYTES:
        return f"expected a path whose names have at most {MAX_FILE_NAME_BYTES} bytes"
    return ""


def _structure_choice(value: Any, kind: Any) -> Any:
    if type(value) is float and value == math.inf:
        value = "inf"  # numbers are finite; a setting that allows infinity lists it as a choice
    for plain, choice in pair_toml_values_with_choices(kind):
        if type(plain) is type(value) and plain == value:  # since True == 1 == 1.0 in Python
            return choice
    raise MismatchError(value, kind)


def _make_array_hook(kind: Any, converter: Converter) -> Hook:
    items = list_structure_factory(kind if typing.get_args(kind) else list, converter)
    return _make_container_hook(
        list, items if _get_origin_or_type(kind) is list else lambda value, kind: tuple(items(value, kind))
    )


def _make_mapping_hook(kind: Any, converter: Converter) -> Hook:
    return _make_container_hook(dict, mapping_structure_factory(kind if typing.get_args(kind) else dict, converter))


def _make_container_hook(shape: type, inside: Hook) -> Hook:
    """Return a hook for an array or a table whose items are converted by the hook `inside`."""

    def structure(value: Any, kind: Any) -> Any:
        if not isinstance(value, shape):
            raise MismatchError(value, kind)
        return inside(value, kind)

    return structure


def _raise_unsupported_type(kind: Any) -> Any:
    raise TypeError(f"a setting can't be of type {kind}: TOML can't express this type")


def _get_origin_or_type(kind: Any) -> Any:
    return typing.get_origin(kind) or kind


def _is_variable_length_array(kind: Any) -> bool:
    return _get_origin_or_type(kind) in (list, Sequence) or kind is tuple or typing.get_args(kind)[1:] == (...,)
