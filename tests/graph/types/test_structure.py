"""Conversion of recipe values to settings, and back."""

import functools
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from datetime import time as time_of_day
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.graph import at_least, setting
from drawloom.graph.inspect.serialize import convert_to_toml_types
from drawloom.graph.problems import KeyPath, Problem
from drawloom.graph.types.structure import ValueConverter


class Colour(Enum):
    RED = "red"
    BLUE = "blue"
    NONE = 0


class Size(StrEnum):
    SMALL = "s"
    LARGE = "l"


class Level(IntEnum):
    LOW = 1


@attrs.frozen
class Curve:
    rate: float
    shape: Literal["linear", "cosine"] = "linear"
    steps: int = setting(default=1, check=at_least(1))
    _hidden: bool = False
    derived: int = attrs.field(init=False, default=0)


@attrs.frozen(kw_only=True)
class Plan:
    first: Curve
    others: list[Curve] = attrs.field(factory=list)
    deeper: "Plan | None" = None

    def __attrs_post_init__(self) -> None:
        if self.first.rate > 5:
            raise ValueError("a plan must not begin so fast")


def find_problems(value: Any, kind: Any, **more: Any) -> list[Problem]:
    result, problems = ValueConverter().structure(value, kind, **more)
    assert (result is None) or not problems
    return problems


def problem(path: KeyPath, text: str, hint: str = "") -> Problem:
    return Problem("DL303", text, hint, path=path)


def plain(value: Any) -> Any:
    """Return a setting's value as tomli reads it from a recipe, without escapes."""
    return _unescape(convert_to_toml_types(value))


def _unescape(value: Any) -> Any:
    if isinstance(value, str):
        return value[1:] if value[:2] in ("@@", "$$") else value
    if isinstance(value, list):
        return [_unescape(item) for item in value]
    return {key: _unescape(item) for key, item in value.items()} if isinstance(value, dict) else value


def convert(value: Any, kind: Any) -> Any:
    result, problems = ValueConverter().structure(value, kind)
    assert problems == []
    return result


# -- accepted values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind", "result"),
    [
        ("x", str, "x"),
        (3, float, 3.0),
        (-(2**63), int, -(2**63)),
        ("a/b", Path, Path("a/b")),
        (date(2020, 1, 1), date, date(2020, 1, 1)),
        ("red", Colour, Colour.RED),
        (0, Colour, Colour.NONE),
        ("s", Size, Size.SMALL),
        (1, Level, Level.LOW),
        ([1, 2], list[float], [1.0, 2.0]),
        ([1, 2], tuple[float, ...], (1.0, 2.0)),
        ([1, 2], Sequence[int], (1, 2)),
        ([1, "a"], tuple[int, str], (1, "a")),
        ([], tuple[()], ()),
        ([1, "a"], list, [1, "a"]),
        ([1, "a"], tuple, (1, "a")),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
        ({"a": 1}, Mapping[str, int], {"a": 1}),
        ({"a": [1]}, dict, {"a": [1]}),
        ({"a": [1]}, Any, {"a": [1]}),
        (None, int | None, None),
        ("last", int | Literal["last", "never"], "last"),
        ("inf", float | Literal["inf"], "inf"),
        (math.inf, float | Literal["inf"], "inf"),
        (3, float | int, 3),
        (3, Curve | int, 3),
        ({"rate": 1}, Curve | None, Curve(1.0)),
        ({"rate": 1, "hidden": True}, Curve, Curve(1.0, hidden=True)),
        ([["1"], 1], list[list[str] | int], [["1"], 1]),
    ],
)
def test_a_value_of_the_right_type_is_accepted(value: Any, kind: Any, result: Any) -> None:
    """An accepted value has its exact Python type at every depth."""
    assert repr(convert(value, kind)) == repr(result)


# -- what is said -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind", "text", "hint"),
    [
        ("4096", int, 'expected an integer, got the string "4096"', "write 4096 without quotes"),
        (8.0, int, "expected an integer, got the number 8.0", "write 8"),
        (1.7, int, "expected an integer, got the number 1.7", ""),
        (True, int, "expected an integer, got true", ""),
        (2**63, int, "expected an integer of at most 64 bits, got the integer 9223372036854775808", ""),
        ("1e-4", float, 'expected a number, got the string "1e-4"', "write 1e-4 without quotes"),
        ("0,001", float, 'expected a number, got the string "0,001"', "write 0.001: decimals have a point"),
        (math.nan, float, "expected a finite number, got the number nan", ""),
        (-math.inf, float, "expected a finite number, got the number -inf", ""),
        (
            2**53 + 1,
            float,
            "expected a number that a float represents exactly, got the integer 9007199254740993",
            "",
        ),
        ("False", bool, 'expected a boolean, got the string "False"', "write false without quotes"),
        (1, bool, "expected a boolean, got the integer 1", "write true"),
        (10, str, "expected a string, got the integer 10", 'write "10"'),
        (date(2020, 1, 2), str, "expected a string, got the date 2020-01-02", 'write "2020-01-02"'),
        (datetime(2020, 1, 2), date, "expected a date, got the date-time 2020-01-02T00:00:00", ""),
        ("\udce4", str, "expected text without lone surrogates, got the string '\\udce4'", ""),
        ("", Path, 'expected a path, got the string ""', ""),
        ("~/a", Path, 'expected the path in full, because only a shell expands ~, got the string "~/a"', ""),
        ("a\nb", Path, 'expected a path without newline and NUL, got the string "a\\nb"', ""),
        (
            f"a/{'b' * 256}",
            Path,
            f'expected a path whose names have at most 255 bytes, got the string "a/{"b" * 34}...',
            "",
        ),
        ("a\0", Path, 'expected a path without newline and NUL, got the string "a\\u0000"', ""),
        ("ab", list[str], 'expected an array of strings, got the string "ab"', 'write ["ab"]'),
        ("[1, 2]", list[int], 'expected an array of integers, got the string "[1, 2]"', "write [1, 2] without quotes"),
        ([1], int, "expected an integer, got the array [1]", "write 1 without brackets"),
        ({"a": 1}, list[int], "expected an array of integers, got the table { a = 1 }", ""),
        ([1, 2, 3], tuple[float, float], "expected an array of 2 numbers, got 3 items", ""),
        ([1], tuple[int, str], "expected an array [integer, string], got 1 item", ""),
        ({}, tuple[int, str], "expected an array [integer, string], got the table {}", ""),
        (3, dict[str, int], "expected a table of integers, got the integer 3", ""),
        (3, Curve, "expected a table with rate, shape, steps, hidden, got the integer 3", ""),
        (
            "tarin",
            Literal["train", "held_out"],
            'expected "train" or "held_out", got the string "tarin"',
            'did you mean "train"?',
        ),
        ("zzz", Literal["train", "held_out"], 'expected "train" or "held_out", got the string "zzz"', ""),
        (True, Literal[1], "expected 1, got true", ""),
        ("RED", Colour, 'expected "red", "blue" or 0, got the string "RED"', 'did you mean "red"?'),
        (False, Colour, 'expected "red", "blue" or 0, got false', ""),
        (
            "lst",
            int | Literal["last", "never"],
            'expected an integer, "last" or "never", got the string "lst"',
            'did you mean "last"?',
        ),
        (2.0, int | Literal["last"] | None, 'expected an integer or "last", got the number 2.0', "write 2"),
        (math.nan, float | None, "expected a finite number, got the number nan", ""),
        (
            {"rate": "x"},
            Curve | dict[str, int],
            'expected a table with rate, shape, steps, hidden or a table of integers, got the table { rate = "x" }',
            "",
        ),
        (None, int, "expected an integer, got nothing", ""),
        ("x" * 50, int, f'expected an integer, got the string "{"x" * 36}...', ""),
        ("x" * 90, list[str], f'expected an array of strings, got the string "{"x" * 36}...', ""),
        ([1] * 50, str, "expected a string, got the array [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, ...", ""),
    ],
)
def test_a_message_names_the_expected_type_and_the_value(value: Any, kind: Any, text: str, hint: str) -> None:
    """The message uses TOML's names of types, and suggests a correction if one is likely."""
    assert find_problems(value, kind) == [problem((), text, hint)]


def test_all_problems_of_a_value_are_reported_with_their_paths() -> None:
    """Unknown and missing keys, wrong types and failed checks are reported at once, at any depth."""
    value = {
        "first": {"rat": 1, "shape": "cosin", "steps": 0},
        "others": [{"rate": 1}, {"rate": "1"}, 3],
        "deeper": {"first": {"rate": 1, "derived": 3}, "nonsense": 1},
    }
    assert find_problems(value, Plan) == [
        problem(("first", "rate"), "missing, expected a number", "write rate = ..."),
        problem(("first", "shape"), 'expected "linear" or "cosine", got the string "cosin"', 'did you mean "cosine"?'),
        problem(("first", "steps"), "0 is less than 1"),
        problem(("first", "rat"), "unknown key", "did you mean 'rate'?"),
        problem(("others", 1, "rate"), 'expected a number, got the string "1"', "write 1 without quotes"),
        problem(("others", 2), "expected a table with rate, shape, steps, hidden, got the integer 3"),
        problem(("deeper", "first", "derived"), "unknown key", "available: hidden, rate, shape, steps"),
        problem(("deeper", "nonsense"), "unknown key", "available: deeper, first, others"),
    ]


@pytest.mark.parametrize(
    ("value", "kind", "path"),
    [
        ([1, "2"], list[int], (1,)),
        ([1, "2"], tuple[int, ...], (1,)),
        ([1, 2], tuple[int, str], (1,)),
        ({"a": [1, "2"]}, dict[str, list[int]], ("a", 1)),
        ({"rate": 1, "hidden": 1}, Curve, ("hidden",)),
        ([["x"]], list[list[int]] | int, (0, 0)),
        ({"rate": "1"}, Curve | Literal["none"], ("rate",)),
    ],
)
def test_the_path_of_a_problem_leads_to_the_wrong_part(value: Any, kind: Any, path: tuple[str | int, ...]) -> None:
    """A path leads through arrays, tables and the union member with the value's shape."""
    assert [fault.path for fault in find_problems(value, kind)] == [path]


def test_a_check_of_several_fields_is_a_problem_of_the_table() -> None:
    """A ValueError in an attrs class's constructor is a problem of the table."""
    assert find_problems({"first": {"rate": 9.0}}, Plan) == [problem((), "a plan must not begin so fast")]


def test_a_check_comes_after_the_type_and_may_refuse() -> None:
    """A check gets the converted value, and its reason is the problem's text."""
    assert find_problems(3, float, check=lambda value: f"{value!r} is odd") == [problem((), "3.0 is odd")]
    assert find_problems(0, int, check=at_least(1)) == [problem((), "0 is less than 1")]
    assert find_problems(3, float, check=at_least(1)) == []
    assert find_problems("3", int, check=at_least(9))[0].text == 'expected an integer, got the string "3"'


@pytest.mark.parametrize("mistake", [TypeError, KeyError, ValueError, RuntimeError])
def test_a_bug_in_a_check_is_raised_and_not_reported_as_a_problem(mistake: type[Exception]) -> None:
    """The exception of a buggy check is raised unchanged, at any depth."""

    def check(value: Any) -> str:
        raise mistake("of mine")

    @attrs.frozen
    class Broken:
        x: int = setting(check=check)

    with pytest.raises(mistake, match="of mine"):
        ValueConverter().structure({"x": 1}, Broken)
    with pytest.raises(mistake, match="of mine"):
        ValueConverter().structure(1, int, check=check)


@pytest.mark.parametrize("kind", [set[int], bytes, complex, list[set[int]], int | bytes, Callable, dict[str, bytes]])
def test_a_setting_type_that_toml_lacks_is_a_type_error(kind: Any) -> None:
    """A setting whose type TOML lacks raises TypeError instead of being converted."""
    with pytest.raises(TypeError, match="can't be of type"):
        ValueConverter().structure({"a": "x"} if kind == dict[str, bytes] else ["x"], kind)


def test_classes_may_contain_themselves() -> None:
    """Recursive attrs classes are converted and checked at any depth."""
    value: dict[str, Any] = {"first": {"rate": 1}, "deeper": {"first": {"rate": 2}, "deeper": {"first": {"rate": "3"}}}}
    assert [fault.path for fault in find_problems(value, Plan)] == [("deeper", "deeper", "first", "rate")]
    value["deeper"]["deeper"] = {"first": {"rate": 3}}
    plan = convert(value, Plan)
    assert plan.deeper.deeper == Plan(first=Curve(3.0))


# -- any value, any type ------------------------------------------------------------------------------------------

SCALAR_KINDS = [str, bool, int, float, Path, date, datetime, time_of_day]
CHOICES = [Literal["a", "b"], Literal[1, "a"], Literal[True], Colour, Size, Level]


def make_union(kinds: list[Any]) -> Any:
    return functools.reduce(operator.or_, kinds)


FLAT_KINDS = st.sampled_from([*SCALAR_KINDS, *CHOICES])
UNIONS = st.lists(FLAT_KINDS | st.just(NoneType), min_size=2, max_size=3, unique=True).map(make_union)
KINDS = st.recursive(
    FLAT_KINDS | UNIONS | st.just(Curve),
    lambda inner: st.one_of(
        inner.map(lambda kind: list[kind]),  # type: ignore[valid-type]
        inner.map(lambda kind: tuple[kind, ...]),  # type: ignore[valid-type]
        inner.map(lambda kind: dict[str, kind]),  # type: ignore[valid-type]
        st.lists(inner, min_size=1, max_size=3).map(lambda kinds: tuple[tuple(kinds)]),  # type: ignore[misc]
    ),
    max_leaves=4,
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
SCALARS = st.one_of(
    st.sampled_from(["a", "b", "", "red", "s", "1", "true", 0, 1, 1.0, True, 2**63, 2**53 + 1, math.nan, math.inf]),
    *(TEXTS, st.booleans(), st.integers(), st.floats(), st.dates(), st.datetimes(), st.times()),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["rate", "shape", "steps", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)


def fits(value: Any, kind: Any) -> bool:
    """Return whether a type accepts a value, by a second implementation without cattrs."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is float:
        return (type(value) is float and math.isfinite(value)) or (fits(value, int) and value == float(value))
    if kind is Path:
        return type(value) is str and value != "" and not set(value) & {"\n", "\0"}
    if kind is int:
        return type(value) is int and -(2**63) <= value < 2**63
    if kind in SCALAR_KINDS:
        return type(value) is kind
    if origin is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        choices = inner or [member.value for member in kind]
        return any(type(value) is type(choice) and value == choice for choice in choices)
    if kind is Curve:
        return (
            isinstance(value, dict)
            and set(value) <= {"rate", "shape", "steps", "hidden"}
            and fits(value.get("rate"), float)
            and fits(value.get("shape", "linear"), Literal["linear", "cosine"])
            and fits(value.get("steps", 1), int)
            and value.get("steps", 1) >= 1
            and fits(value.get("hidden", False), bool)
        )
    if origin is list or inner[1:] == (...,):
        return isinstance(value, list) and all(fits(item, inner[0]) for item in value)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(inner) and all(map(fits, value, inner))
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, inner[1]) for item in value.values())
    return (value is None and NoneType in inner) or any(
        fits(value, member) for member in inner if member is not NoneType
    )


@st.composite
def fitting_values(draw: st.DrawFn, kind: Any) -> Any:
    """Draw a Python value of a type."""
    origin, inner = get_origin(kind), get_args(kind)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        str: TEXTS,
        bool: st.booleans(),
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        Path: st.sampled_from([Path("a/b"), Path("."), Path("/ä b")]),
        date: st.dates(),
        datetime: st.datetimes(),
        time_of_day: st.times(),
        NoneType: st.none(),
    }
    if kind in plain:
        return draw(plain[kind])
    if origin is Literal:
        return draw(st.sampled_from(inner))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return draw(st.sampled_from(list(kind)))
    if kind is Curve:
        return Curve(draw(plain[float]), draw(st.sampled_from(["linear", "cosine"])), draw(st.integers(1, 9)))
    if origin is list or inner[1:] == (...,):
        items = draw(st.lists(fitting_values(inner[0]), max_size=3))
        return items if origin is list else tuple(items)
    if origin is tuple:
        return tuple(draw(fitting_values(item)) for item in inner)
    if origin is dict:
        return draw(st.dictionaries(TEXTS, fitting_values(inner[1]), max_size=3))
    return draw(fitting_values(draw(st.sampled_from(inner))))


@given(st.data(), KINDS)
def test_a_type_accepts_exactly_the_values_that_fit_it(data: st.DataObject, kind: Any) -> None:
    """A value is accepted exactly if it fits, and only an integer may become an equal float."""
    value = data.draw(VALUES | fitting_values(kind).map(plain))
    assert (find_problems(value, kind) == []) == fits(value, kind)


@given(st.data(), KINDS)
def test_unstructuring_and_structuring_returns_an_equal_value(data: st.DataObject, kind: Any) -> None:
    """A value without unions, which may choose another member for the same TOML, keeps its type."""
    value = data.draw(fitting_values(kind))
    written = plain(value)
    again = convert(written, kind)
    assert plain(again) == written
    if not any(sign in str(kind) for sign in ("|", "Union", "Optional")):
        assert again == value
        assert type(again) is type(value)


@given(KINDS, VALUES)
def test_every_problem_has_a_path_inside_the_value(kind: Any, value: Any) -> None:
    """A problem's path leads to a part of the value, or one step further to a missing key."""
    for fault in find_problems(value, kind):
        missing = fault.text.startswith("missing")
        here = functools.reduce(operator.getitem, fault.path[:-1] if missing else fault.path, value)
        assert not missing or fault.path[-1] not in here


# -- back to TOML -----------------------------------------------------------------------------------------------------


def test_unstructured_values_are_plain() -> None:
    """Classes become tables without None, paths strings, enum members their values, and tuples lists."""
    plan = Plan(first=Curve(1.0, hidden=True), deeper=None)
    assert plain(plan) == {
        "first": {"rate": 1.0, "shape": "linear", "steps": 1, "hidden": True},
        "others": [],
    }
    written = plain((Path("a"), Colour.NONE, Size.SMALL, {"y": (1,)}))
    assert repr(written) == "['a', 0, 's', {'y': [1]}]"
    assert plain(None) is None


# -- speed -----------------------------------------------------------------------------------------------


def test_thousands_of_plain_settings_are_converted_quickly() -> None:
    """4000 settings take 1.5 ms of processor time, and the bound leaves room for slow machines."""
    values, pairs = ValueConverter(), [(3, int), (1.5, float), ("x", str), (True, bool)] * 1000
    start = time.process_time()
    for value, kind in pairs:
        values.structure(value, kind)
    assert time.process_time() - start < 0.05
