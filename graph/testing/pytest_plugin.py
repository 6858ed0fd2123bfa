"""
The testing API as fixtures; pytest finds this module by an entry point when drawloom is installed.

Since every run of pytest in the same environment loads it, it imports nothing heavy, and its fixtures carry a prefix.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest


@pytest.fixture
def drawloom_build() -> Callable[..., Any]:
    """`drawloom.testing.build`: one component, with the checks of a recipe."""
    from drawloom.graph import testing

    return testing.build


@pytest.fixture
def drawloom_fake() -> Callable[..., Any]:
    """`drawloom.testing.fake`: an object that implements a port and records its calls."""
    from drawloom.graph import testing

    return testing.fake


@pytest.fixture
def drawloom_check_port() -> Callable[..., None]:
    """`drawloom.testing.check_port`: check an implementation against the contract of a port."""
    from drawloom.graph import testing

    return testing.check_port


@pytest.fixture
def drawloom_opened() -> Iterator[Callable[[Any], Any]]:
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
