"""
The testing API as fixtures; pytest finds this module by an entry point when drawloom is installed.

It imports nothing heavy, since every run of pytest in the same environment loads it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest


@pytest.fixture
def build() -> Callable[..., Any]:
    """`drawloom.graph.testing.build`: one component, with the checks of a recipe."""
    from drawloom.graph import testing

    return testing.build


@pytest.fixture
def fake() -> Callable[..., Any]:
    """`drawloom.graph.testing.ports`: an object that implements a port and records its calls."""
    from drawloom.graph import testing

    return testing.fake


@pytest.fixture
def check_port() -> Callable[..., None]:
    """`drawloom.graph.testing.check_port`: check an implementation against the contract of a port."""
    from drawloom.graph import testing

    return testing.check_port


@pytest.fixture
def opened() -> Iterator[Callable[[Any], Any]]:
    """A function that opens a component, or enters a container, until the test ends, and returns it."""
    with ExitStack() as stack:

        def open_one(item: Any) -> Any:
            if hasattr(item, "__enter__"):
                return stack.enter_context(item)
            if hasattr(item, "close"):
                stack.callback(item.close)
            if hasattr(item, "open"):
                item.open()
            return item

        yield open_one
