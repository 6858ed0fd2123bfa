"""Settings from TOML values, strictly: what does not have its type is a fault, and all faults come at once."""

import math
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, time
from enum import Enum
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Literal

import attrs
from cattrs import BaseValidationError, Converter, ForbiddenExtraKeysError
from cattrs.cols import list_structure_factory, mapping_structure_factory
from cattrs.errors import AttributeValidationNote, IterableValidationError, IterableValidationNote
from cattrs.gen import make_dict_structure_fn, override

from drawloom.graph.setting import Check
from drawloom.graph.toml import emit
from drawloom.graph.toml.suggest import did_you_mean, nearest
from drawloom.graph.types import describe as words
from drawloom.graph.types.coercion_hints import near_misses

Hook = Callable[[Any, Any], Any]
KeyPath = tuple[str | int, ...]


@attrs.frozen
class Fault:
    """What is wrong in a value: where inside it, what stands there and why it can't be, and what to write instead."""

    path: KeyPath
    text: str
    hint: str = ""


class Values:
    """
    Makes what components' fields are typed as from what tomli reads.

    The types: str, bool, int, float, Path, datetime, date, time, Literal, Enum (by value), list, tuple, Sequence,
    dict, Mapping, attrs classes, unions of all these, and Any. Another type raises TypeError: that is the fault of a
    component, not of a recipe.
    """

    describe = staticmethod(words.describe)
    describe_type = staticmethod(words.describe_type)

    def structure(self, value: Any, kind: Any, check: Check | None = None) -> tuple[Any, list[Fault]]:
        """The value as `kind` and no faults, or None and all that is wrong with it."""
        if type(value) is kind and kind in (str, bool, int, float) and not check and not _objection(value, kind):
            return value, []  # as most settings are
        try:
            hook = self._with_check(check) if check else self._structure
            return hook(value, kind), []
        except (_Mismatch, BaseValidationError) as error:
            return None, list(self._faults(error, ()))

    @staticmethod
    def unstructure(value: Any) -> Any:
        """
        A value in plain TOML types, which `structure` makes into an equal one; None stays None, to be left out.

        The table of an attrs class is without what is None, so that it comes back only where it is the default.
        """
        plain = Values.unstructure
        match value:
            case Enum():
                return plain(value.value)
            case PurePath():
                return str(value)
            case list() | tuple():
                return [plain(item) for item in value]
            case Mapping():
                return {name: plain(item) for name, item in value.items()}
            case _ if attrs.has(type(value)):
                fields = [field for field in attrs.fields(type(value)) if field.init]
                table = {field.alias: getattr(value, field.name) for field in fields}
                return {name: plain(item) for name, item in table.items() if item is not None}
        return value

    def _structure(self, value: Any, kind: Any) -> Any:
        return self._converter.get_structure_hook(kind)(value, kind)

    def _with_check(self, check: Check) -> Hook:
        def structure(value: Any, kind: Any) -> Any:
            result = self._structure(value, kind)
            if reason := check(result):
                raise _Mismatch(value, kind, reason)
            return result

        return structure

    @cached_property
    def _converter(self) -> Converter:
        """One hook for each sort of type: the last whose predicate holds, but classes named outright come first."""
        converter = Converter(detailed_validation=True)
        converter.register_structure_hook_factory(lambda kind: True, _refuse)
        converter.register_structure_hook_func(lambda kind: kind in (Any, object), lambda value, kind: value)
        converter.register_structure_hook_func(_is_literal, _choose)
        converter.register_structure_hook_func(lambda kind: words.members(kind) != [kind], self._union)
        converter.register_structure_hook_func(lambda kind: _origin(kind) is tuple, self._fixed_array)
        converter.register_structure_hook_factory(_is_array, _array)
        converter.register_structure_hook_factory(lambda kind: _origin(kind) in (dict, Mapping), _table)
        converter.register_structure_hook_factory(_is_class, self._class)
        for kind in (str, bytes, bool, int, float, Path, date, time, Enum):  # and all that is derived from them
            converter.register_structure_hook(kind, _scalar)
        return converter

    def _union(self, value: Any, kind: Any) -> Any:
        """The first member that takes the value, integers before numbers; or else the fault inside the nearest one."""
        if value is None and type(None) in typing.get_args(kind):
            return None
        inside: list[Exception] = []
        for member in sorted(words.members(kind), key=lambda member: member is float):
            try:
                return self._structure(value, member)
            except _Mismatch as error:
                inside += [error] if error.reason else []
            except BaseValidationError as error:
                inside.append(error)
        raise inside[0] if len(inside) == 1 else _Mismatch(value, kind)

    def _fixed_array(self, value: Any, kind: Any) -> tuple[Any, ...]:
        kinds = typing.get_args(kind)
        if not isinstance(value, list):
            raise _Mismatch(value, kind)
        if len(value) != len(kinds):
            raise _Mismatch(value, kind, f"{words.expected(kind)}: {len(kinds)} wanted, {len(value)} given")
        items, errors = [], []
        for index, (item, of) in enumerate(zip(value, kinds, strict=True)):
            try:
                items.append(self._structure(item, of))
            except (_Mismatch, BaseValidationError) as error:
                error.add_note(IterableValidationNote("", index, of))
                errors.append(error)
        if errors:
            raise IterableValidationError("", errors, kind)
        return tuple(items)

    def _class(self, kind: type, converter: Converter) -> Hook:
        """A table with exactly the fields of an attrs class, each with the check of its own."""
        checks = {field.name: check for field in attrs.fields(kind) if (check := field.metadata.get("check"))}
        checked: dict[str, Any] = {name: override(struct_hook=self._with_check(checks[name])) for name in checks}
        inside: Hook = make_dict_structure_fn(
            kind, converter, _cattrs_forbid_extra_keys=True, _cattrs_use_alias=True, **checked
        )
        return _of_shape(dict, inside)

    def _faults(self, error: Exception, path: KeyPath) -> Iterator[Fault]:
        """A tree of errors as cattrs raises it, flat; the note of an error is its step in the path."""
        note = next((note for note in getattr(error, "__notes__", ()) if type(note) is not str), None)
        if isinstance(note, AttributeValidationNote):
            path = (*path, note.name.lstrip("_"))
        elif isinstance(note, IterableValidationNote):
            path = (*path, note.index)
        if isinstance(error, BaseValidationError):
            for inner in error.exceptions:
                yield from self._faults(inner, path)
        elif isinstance(error, _Mismatch):
            yield Fault(path, str(error), "" if error.reason else self._hint(error.value, error.kind))
        elif isinstance(error, ForbiddenExtraKeysError):
            known = [field.alias for field in attrs.fields(error.cl) if field.init]
            for name in sorted(error.extra_fields):
                yield Fault((*path, name), "unknown key", did_you_mean(name, known))
        elif isinstance(error, KeyError) and note and error.args == path[-1:]:
            yield Fault(path, f"missing, {words.expected(note.type)}", f"write {emit.dump_key(error.args[0])} = ...")
        elif isinstance(error, ValueError | TypeError) and not note:
            yield Fault(path, str(error))  # from the class itself
        else:
            raise error

    def _hint(self, value: Any, kind: Any) -> str:
        for candidate, hint in near_misses(value):
            with suppress(_Mismatch, BaseValidationError):
                self._structure(candidate, kind)
                return hint if len(hint) <= 2 * words.SHOWN else ""
        choices = [plain for member in words.members(kind) if _is_choice(member) for plain, _ in _choices(member)]
        near = nearest(value, filter(_is_string, choices)) if _is_string(value) else None
        return "" if near is None else f"did you mean {emit.dumps(near)}?"


class _Mismatch(ValueError):
    """A value that is no `kind`, or, with a reason, one that can't be all the same."""

    def __init__(self, value: Any, kind: Any, reason: str = "") -> None:
        super().__init__(reason or f"{words.expected(kind)}, got {words.describe(value)}")
        self.value, self.kind, self.reason = value, kind, reason


def _scalar(value: Any, kind: Any) -> Any:
    if _is_choice(kind):
        return _choose(value, kind)
    if kind not in words.NOUNS:
        return _refuse(kind)
    if type(value) not in {Path: (str,), float: (float, int)}.get(kind, (kind,)):
        raise _Mismatch(value, kind)
    if objection := _objection(value, kind):
        raise _Mismatch(value, kind, f"{objection}, got {words.describe(value)}")
    return kind(value) if kind in (Path, float) else value


def _objection(value: Any, kind: Any) -> str:
    """Why a value can't be, though it has the type of TOML that is expected."""
    if type(value) is str and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        return "expected text without lone surrogates"
    if type(value) is int and not -(2**63) <= value < 2**63:
        return "expected an integer of at most 64 bits"
    if kind is float and not math.isfinite(value):
        return "expected a finite number"
    if kind is float and float(value) != value:
        return "expected a number that floating point holds exactly"
    if kind is Path and (not value or "\0" in value or "\n" in value):
        return "expected a path without newline and NUL" if value else "expected a path"
    return ""


def _choose(value: Any, kind: Any) -> Any:
    for plain, choice in _choices(kind):
        if type(plain) is type(value) and plain == value:  # for Python, True is 1 and 1 is 1.0
            return choice
    raise _Mismatch(value, kind)


def _choices(kind: Any) -> list[tuple[Any, Any]]:
    """What is written for each member of an Enum or a Literal, and the member."""
    if _is_literal(kind):
        return [(choice, choice) for choice in typing.get_args(kind)]
    return [(member.value, member) for member in kind]


def _array(kind: Any, converter: Converter) -> Hook:
    items = list_structure_factory(kind if typing.get_args(kind) else list, converter)
    return _of_shape(list, items if _origin(kind) is list else lambda value, kind: tuple(items(value, kind)))


def _table(kind: Any, converter: Converter) -> Hook:
    return _of_shape(dict, mapping_structure_factory(kind if typing.get_args(kind) else dict, converter))


def _of_shape(shape: type, inside: Hook) -> Hook:
    """A hook for what is inside an array or a table, once it is known to be one."""

    def structure(value: Any, kind: Any) -> Any:
        if not isinstance(value, shape):
            raise _Mismatch(value, kind)
        return inside(value, kind)

    return structure


def _refuse(kind: Any) -> Any:
    raise TypeError(f"a setting can't be of type {kind}: no recipe could write one")


def _origin(kind: Any) -> Any:
    return typing.get_origin(kind) or kind


def _is_array(kind: Any) -> bool:
    return _origin(kind) in (list, Sequence) or kind is tuple or typing.get_args(kind)[1:] == (...,)


def _is_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is Literal


def _is_choice(kind: Any) -> bool:
    return _is_literal(kind) or (isinstance(kind, type) and issubclass(kind, Enum))


def _is_class(kind: Any) -> bool:
    return isinstance(kind, type) and attrs.has(kind)


def _is_string(value: Any) -> bool:
    return isinstance(value, str)
