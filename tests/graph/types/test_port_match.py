"""Whether a class keeps a port's promises."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from drawloom.graph.types.port_match import find_call_mismatch, find_members, find_mismatches

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Reads(Protocol):
    """Reads."""

    name: str

    @property
    def size(self) -> int: ...

    def read(self, key: str, *, times: int = 1) -> bytes: ...


class Source(Protocol[T_co]):
    """Gives items."""

    def items(self) -> Iterator[T_co]: ...


class Linked(Protocol):
    """Knows the next of its kind."""

    def next(self) -> "Linked | None": ...


class Reader(Protocol):
    """Makes what reads."""

    def make(self) -> Reads: ...


class Good:
    """Fits by its members alone."""

    name: str = "good"
    size: int = 3

    def read(self, key: str, *, times: int = 1, other: bool = False) -> bytes:
        return b""


@attrs.define
class WithField:
    """A field is a member; a value of a callable type is a method."""

    name: str
    size: bool
    read: Callable[..., bytes]


class Looser(Good):
    """Its parameters are wider and its return type is narrower than the port's."""

    def read(self, key: str | int, **rest: Any) -> bytes:
        return b""


class NoSize:
    """Lacks a member."""

    name = "x"

    def read(self, key: str, *, times: int = 1) -> bytes:
        return b""


class WrongSize(Good):
    """Has a member of another type."""

    size: str  # type: ignore[assignment]


class MethodForValue(Good):
    """Has a method where the port has an attribute."""

    def size(self) -> int:  # type: ignore[override]
        return 3


class ValueForMethod(Good):
    """Has a value where a method is promised."""

    @property
    def read(self) -> bytes:  # type: ignore[override]
        return b""


class WrongReturn(Good):
    """Gives something else."""

    def read(self, key: str, *, times: int = 1) -> str:  # type: ignore[override]
        return ""


class WrongParameter(Good):
    """Takes something else."""

    def read(self, key: int, *, times: int = 1) -> bytes:  # type: ignore[override]
        return b""


class WrongCall(Good):
    """Can't be called so."""

    def read(self, key: str, times: int) -> bytes:  # type: ignore[override]
        return b""


class Words:
    """A source of text, by its members."""

    def items(self) -> Iterator[str]:
        return iter(())


class Numbers(Source[int]):
    """A source of numbers, by name."""

    def items(self) -> Iterator[int]:
        return iter(())


class Chain:
    """One of a chain, whose next is a chain again."""

    def next(self) -> "Chain | None":
        return None


class MakesGood:
    """Makes what fits."""

    def make(self) -> Good:
        return Good()


class MakesBad:
    """Makes what does not fit."""

    def make(self) -> NoSize:
        return NoSize()


class Box(Generic[T]):
    """A class, not a Protocol, with a parameter."""


class TextBox(Box[str]):
    """Fills it in."""


@pytest.mark.parametrize(
    ("cls", "port", "reasons"),
    [
        (Good, Reads, []),
        (Looser, Reads, []),
        (WithField, Reads, []),
        (NoSize, Reads, ["has no size"]),
        (WrongSize, Reads, ["has a size that is str, not int"]),
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
    """Members, their types, and the ways in which methods can be called, through generics and other ports."""
    assert find_mismatches(cls, port) == reasons


def test_members_include_all_base_protocols() -> None:
    """In the order in which they are written, without what Protocols bring along themselves."""

    class More(Reads, Protocol):
        more: int

    assert find_members(More) == ("name", "size", "read", "more")


NAMES = ("a", "b", "c")
KINDS = ("", "=0")


@st.composite
def functions(draw: st.DrawFn) -> Callable[..., Any]:
    """A method with any mixture of parameters."""
    before = [f"{name}" for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=3))]
    only_places = draw(st.integers(0, len(before)))
    plain = draw(st.integers(only_places, len(before)))
    optional = draw(st.integers(0, plain))
    words = [f"{name}=0" if number >= optional else name for number, name in enumerate(before[:plain])]
    if only_places:
        words.insert(only_places, "/")
    star = draw(st.booleans())
    names = [name + draw(st.sampled_from(KINDS)) for name in before[plain:]]
    words += ["*rest"] if star else ["*"] if names else []
    words += names + (["**more"] if draw(st.booleans()) else [])
    space: dict[str, Any] = {}
    exec(f"def f({', '.join(['self', *words])}): return None", space)
    function: Callable[..., Any] = space["f"]
    return function


def shown(function: Callable[..., Any]) -> str:
    """For the report of a failure."""
    return str(inspect.signature(function))


def calls() -> list[tuple[tuple[int, ...], dict[str, int]]]:
    """All ways to call with up to four places, and any of the names and one more."""
    named: list[dict[str, int]] = [{}]
    named += [dict.fromkeys(NAMES[:n], 1) for n in (1, 2, 3)] + [{n: 1} for n in "bcx"] + [{"a": 1, "c": 1}]
    named += [{"b": 1, "c": 1}, {"a": 1, "x": 1}]
    return [((0,) * places, names) for places in range(5) for names in named]


def allows(function: Callable[..., Any], call: tuple[tuple[int, ...], dict[str, int]]) -> bool:
    """Whether a call is accepted."""
    try:
        function(None, *call[0], **call[1])
    except TypeError:
        return False
    return True


@given(functions(), functions())
def test_a_class_that_implements_a_port_accepts_every_call_of_it(
    given: Callable[..., Any], promised: Callable[..., Any]
) -> None:
    """If nothing is wrong, every call that the promise allows is taken; if something is, some call is not."""
    assume("**more" not in shown(promised))  # whose names may be those of our parameters, and be given twice
    broken = [call for call in calls() if allows(promised, call) and not allows(given, call)]
    if not find_call_mismatch(given, promised):
        assert not broken, f"{shown(given)} for {shown(promised)}"
    else:
        others = [name for name in inspect.signature(given).parameters if name not in NAMES]
        assert broken or others or _differs_by_place(given, promised), f"{shown(given)} for {shown(promised)}"


def _differs_by_place(given: Callable[..., Any], promised: Callable[..., Any]) -> bool:
    """The same number of parameters at other places: every call binds, but to the wrong ones."""
    return list(inspect.signature(given).parameters) != list(inspect.signature(promised).parameters)


def test_a_coroutine_does_not_implement_a_plain_method() -> None:
    """A coroutine can't replace a plain method, nor the other way round."""

    async def later(self: Any) -> None: ...

    def now(self: Any) -> None: ...

    assert find_call_mismatch(later, now) == "has now() as a coroutine"
    assert find_call_mismatch(now, later) == "has later() not as a coroutine"
