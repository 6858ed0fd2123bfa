"""Attributes with names similar to an optional member."""

import attrs
import pytest

from drawloom.graph import component, setting
from drawloom.graph.lifecycle import Constrained
from drawloom.graph.testing import BrokenContractError, check_port
from drawloom.graph.testing.ports import describe_misspelt_members
from support.shop.components.stores.memory import Memory
from support.shop.ports import Store


class Unclosed(Memory):
    """A store with a misspelt `close`."""

    def closes(self) -> None:
        raise NotImplementedError


def test_check_port_fails_for_a_name_like_that_of_an_optional_method() -> None:
    """A method with a name similar to an optional method fails, and the message names both."""
    with pytest.raises(BrokenContractError, match="Unclosed has closes, which no port declares; did you mean close"):
        check_port(lambda: Unclosed(), Store)


def test_settings_and_declared_members_are_not_misspelt() -> None:
    """Settings and private attributes may have any name, and a field without a setting may not."""

    @component
    class Shelf:
        constraint: int = setting(default=1, doc="a setting")
        notess: int = attrs.field(init=False, default=1)
        _closes: int = attrs.field(init=False, default=1)

        def open(self) -> None:
            raise NotImplementedError

        def get(self, key: str) -> None:
            raise NotImplementedError

    assert describe_misspelt_members(Shelf, Constrained) == [
        "Shelf has notess, which no port declares; did you mean notes?"
    ]
