"""Mismatches of classes and ports."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from drawloom.graph.types.port_match import find_call_mismatch, find_mismatches, list_protocol_members

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Reads(Protocol):
    """Port with members of several kinds."""

    name: str

    @property
    def size(self) -> int: ...

    def read(self, key: str, *, times: int = 1) -> bytes: ...


class Source(Protocol[T_co]):
    """Port of iterators with a type parameter."""

    def items(self) -> Iterator[T_co]: ...


class Linked(Protocol):
    """Port that refers to itself."""

    def next(self) -> "Linked | None": ...


class Reader(Protocol):
    """Port that returns another port."""

    def make(self) -> Reads: ...


class Good:
    """Implementation of Reads that does not inherit from it."""

    name: str = "good"
    size: int = 3

    def read(self, key: str, *, times: int = 1, other: bool = False) -> bytes:
        return b""


class Lazy(Good):
    """A wrong size, beside a private attribute whose type is known to type checkers alone."""

    size: str = "3"  # type: ignore[assignment]
    _source: "Elsewhere"  # type: ignore[name-defined] # noqa: F821


@attrs.define
class WithField:
    """Implementation with a field for an attribute and a callable value for a method."""

    name: str
    size: bool
    read: Callable[..., bytes]


class Looser(Good):
    """Implementation with wider parameters and a narrower return type."""

    def read(self, key: str | int, **rest: Any) -> bytes:
        return b""


class NoSize:
    """Class without a member."""

    name = "x"

    def read(self, key: str, *, times: int = 1) -> bytes:
        return b""


class WrongSize(Good):
    """Class with a member of another type."""

    size: str  # type: ignore[assignment]


class MethodForValue(Good):
    """Class with a method in place of an attribute."""

    def size(self) -> int:  # type: ignore[override]
        return 3


class ValueForMethod(Good):
    """Class with a value in place of a method."""

    @property
    def read(self) -> bytes:  # type: ignore[override]
        return b""


class WrongReturn(Good):
    """Class with another return type."""

    def read(self, key: str, *, times: int = 1) -> str:  # type: ignore[override]
        return ""


class WrongParameter(Good):
    """Class with another parameter type."""

    def read(self, key: int, *, times: int = 1) -> bytes:  # type: ignore[override]
        return b""


class WrongCall(Good):
    """Class with a method that rejects a call of the port."""

    def read(self, key: str, times: int) -> bytes:  # type: ignore[override]
        return b""


class Words:
    """Source of text that does not inherit from the port."""

    def items(self) -> Iterator[str]:
        return iter(())


class Numbers(Source[int]):
    """Source of numbers that inherits from the port."""

    def items(self) -> Iterator[int]:
        return iter(())


class Chain:
    """Implementation of Linked that refers to itself."""

    def next(self) -> "Chain | None":
        return None


class MakesGood:
    """Implementation of Reader that returns a fitting class."""

    def make(self) -> Good:
        return Good()


class MakesBad:
    """Class that returns a class that does not fit."""

    def make(self) -> NoSize:
        return NoSize()


class Box(Generic[T]):
    """Generic class that is not a Protocol."""


class TextBox(Box[str]):
    """Subclass that fills in the type parameter."""


@pytest.mark.parametrize(
    ("cls", "port", "reasons"),
    [
        (Good, Reads, []),
        (Looser, Reads, []),
        (WithField, Reads, []),
        (NoSize, Reads, ["has no size"]),
        (WrongSize, Reads, ["has a size that is str, not int"]),
        (Lazy, Reads, ["has a size that is str, not int"]),
        (MethodForValue, Reads, ["has a method size(), but the port has an attribute"]),
        (ValueForMethod, Reads, ["has an attribute read, but the port has a method"]),
        (WrongReturn, Reads, ["returns str from read(), not bytes"]),
        (WrongParameter, Reads, ["accepts int as key of read(), not str"]),
        (WrongCall, Reads, ["has a read(key, times) that can't be called as read(key, *, times=1)"]),
        (object, Reads, ["has no name", "has no size", "has no read()"]),
        (Words, Source[str], []),
        (Words, Source, []),
        (Words, Source[int], ["returns collections.abc.Iterator[str] from items(), not collections.abc.Iterator[int]"]),
        (Numbers, Source[int], []),
        (Numbers, Source[float], []),
        (Numbers, Source[str], ["is a Source of int, not of str"]),
        (Chain, Linked, []),
        (MakesGood, Reader, []),
        (MakesBad, Reader, ["returns NoSize from make(), not Reads"]),
        (TextBox, Box[str], []),
        (TextBox, Box[int], ["is a Box of str, not of int"]),
        (Words, Box[int], ["is not a Box"]),
    ],
)
def test_every_mismatch_with_a_port_is_reported(cls: type, port: Any, reasons: list[str]) -> None:
    """Mismatches cover members, their types and calls of methods, also through generics and other ports."""
    assert find_mismatches(cls, port) == reasons


def test_members_include_all_base_protocols() -> None:
    """Members are listed in source order, without the members of Protocol itself."""

    class More(Reads, Protocol):
        more: int

    assert list_protocol_members(More) == ("name", "size", "read", "more")


NAMES = ("a", "b", "c")
KINDS = ("", "=0")


@st.composite
def functions(draw: st.DrawFn) -> Callable[..., Any]:
    """Draw a method with a random mixture of parameters."""
    before = [f"{name}" for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=3))]
    positional_only = draw(st.integers(0, len(before)))
    plain = draw(st.integers(positional_only, len(before)))
    optional = draw(st.integers(0, plain))
    words = [f"{name}=0" if number >= optional else name for number, name in enumerate(before[:plain])]
    if positional_only:
        words.insert(positional_only, "/")
    star = draw(st.booleans())
    names = [name + draw(st.sampled_from(KINDS)) for name in before[plain:]]
    words += ["*rest"] if star else ["*"] if names else []
    words += names + (["**more"] if draw(st.booleans()) else [])
    space: dict[str, Any] = {}
    exec(f"def f({', '.join(['self', *words])}): return None", space)
    function: Callable[..., Any] = space["f"]
    return function


def format_signature(function: Callable[..., Any]) -> str:
    """Return the signature as text."""
    return str(inspect.signature(function))


def list_calls() -> list[tuple[tuple[int, ...], dict[str, int]]]:
    """List calls with up to four positional arguments and several sets of keywords."""
    named: list[dict[str, int]] = [{}]
    named += [dict.fromkeys(NAMES[:n], 1) for n in (1, 2, 3)] + [{n: 1} for n in "bcx"] + [{"a": 1, "c": 1}]
    named += [{"b": 1, "c": 1}, {"a": 1, "x": 1}]
    return [((0,) * count, keywords) for count in range(5) for keywords in named]


def allows(function: Callable[..., Any], call: tuple[tuple[int, ...], dict[str, int]]) -> bool:
    """Return whether a function accepts a call."""
    try:
        function(None, *call[0], **call[1])
    except TypeError:
        return False
    return True


@given(functions(), functions())
def test_a_class_that_implements_a_port_accepts_every_call_of_it(
    given: Callable[..., Any], promised: Callable[..., Any]
) -> None:
    """Without a mismatch every call of the port is accepted, and with one some call is not."""
    assume("**more" not in format_signature(promised))  # keywords could repeat names of our parameters
    broken = [call for call in list_calls() if allows(promised, call) and not allows(given, call)]
    if not find_call_mismatch(given, promised):
        assert not broken, f"{format_signature(given)} for {format_signature(promised)}"
    else:
        others = [name for name in inspect.signature(given).parameters if name not in NAMES]
        assert broken or others or _differs_by_position(given, promised), (
            f"{format_signature(given)} for {format_signature(promised)}"
        )


def _differs_by_position(given: Callable[..., Any], promised: Callable[..., Any]) -> bool:
    """Return whether parameters have other positions, so that calls bind to the wrong parameters."""
    return list(inspect.signature(given).parameters) != list(inspect.signature(promised).parameters)


def test_a_coroutine_does_not_implement_a_plain_method() -> None:
    """Neither a coroutine implements a plain method nor a plain method a coroutine."""

    async def later(self: Any) -> None: ...

    def now(self: Any) -> None: ...

    assert find_call_mismatch(later, now) == "has now() as a coroutine"
    assert find_call_mismatch(now, later) == "has later() not as a coroutine"
