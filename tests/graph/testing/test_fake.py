"""Fakes of ports."""

from collections.abc import Iterator
from typing import Literal, Protocol

import pytest

from drawloom.graph.port import port
from drawloom.graph.testing import Call, fake
from drawloom.graph.types.port_match import mismatches
from support.shop.ports import Counted, Page, Store


@port
class Rich(Protocol):
    """Promises things of many types."""

    name: str
    choice: Literal["a", "b"]

    @property
    def page(self) -> Page: ...

    def texts(self) -> list[str]: ...

    def either(self) -> int | str: ...

    def maybe(self) -> int | None: ...

    def items(self) -> Iterator[int]: ...


@pytest.mark.parametrize("kind", [Store, Page, Counted, Rich])
def test_a_fake_fits_its_port(kind: type) -> None:
    """A fake passes the check that every component passes."""
    assert mismatches(type(fake(kind)), kind) == []


def test_a_fake_fits_several_ports() -> None:
    """One object may keep the promises of more than one port."""
    both = fake(Page, Counted, count=3)
    assert mismatches(type(both), Page) == mismatches(type(both), Counted) == [] and both.count == 3


def test_calls_are_remembered_by_name() -> None:
    """However arguments are given, they are told by the names that the port gives them."""
    store = fake(Store)
    store.put("a", value=1)
    store.get(key="a")
    assert store.calls == [Call("put", {"key": "a", "value": 1}), Call("get", {"key": "a"})]
    assert fake(Store).calls == []


def test_answers_are_values_or_functions() -> None:
    """A method gives what it is told to, or what a function of its arguments gives."""
    store = fake(Store, get=lambda key: key * 2)
    assert store.get("ab") == "abab" and fake(Store, get=3).get("x") == 3


def test_what_nobody_answers_is_nothing_of_its_type() -> None:
    """Zero, no text, an empty list, the first of a choice, a fake of another port."""
    rich = fake(Rich)
    assert (rich.name, rich.choice, rich.texts(), rich.either(), rich.maybe(), list(rich.items())) == (
        "",
        "a",
        [],
        0,
        None,
        [],
    )
    assert rich.page.answer("x") == ""


def test_what_the_port_does_not_know_is_refused() -> None:
    """Neither a call nor an answer that the port does not have goes through."""
    with pytest.raises(TypeError, match="too many positional arguments"):
        fake(Store).get("a", "b")
    with pytest.raises(TypeError, match="Store has no fetch; there is get, put"):
        fake(Store, fetch=3)
