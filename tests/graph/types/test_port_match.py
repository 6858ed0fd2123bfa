"""Whether a class keeps a port's promises."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import attrs
import pytest

from drawloom.graph.types.port_match import members, mismatches

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
    """Takes more and gives less than is asked."""

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
    """Has a method where a value is promised."""

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
        (MethodForValue, Reads, ["has a method size(), where a value is promised"]),
        (ValueForMethod, Reads, ["has a value read, where a method is promised"]),
        (WrongReturn, Reads, ["gives str from read(), not bytes"]),
        (WrongParameter, Reads, ["takes int as key of read(), not str"]),
        (WrongCall, Reads, ["has a read(key, times) that can't be called as read(key, *, times=1)"]),
        (object, Reads, ["has no name", "has no size", "has no read()"]),
        (Words, Source[str], []),
        (Words, Source, []),
        (Words, Source[int], ["gives collections.abc.Iterator[str] from items(), not collections.abc.Iterator[int]"]),
        (Numbers, Source[int], []),
        (Numbers, Source[float], []),
        (Numbers, Source[str], ["is a Source of int, not of str"]),
        (Chain, Linked, []),
        (MakesGood, Reader, []),
        (MakesBad, Reader, ["gives NoSize from make(), not Reads"]),
        (TextBox, Box[str], []),
        (TextBox, Box[int], ["is a Box of str, not of int"]),
        (Words, Box[int], ["is no Box"]),
    ],
)
def test_every_broken_promise_is_told(cls: type, port: Any, reasons: list[str]) -> None:
    """Members, their types, and the ways in which methods can be called, through generics and other ports."""
    assert mismatches(cls, port) == reasons


def test_members_are_those_of_all_protocols_above() -> None:
    """In the order in which they are written, without what Protocols bring along themselves."""

    class More(Reads, Protocol):
        more: int

    assert members(More) == ("name", "size", "read", "more")
