"""
The testing API as fixtures. pytest finds this module by an entry point when drawloom is installed.

Every run of pytest in the environment loads this module. So it imports nothing heavy, and its fixtures have a prefix.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest


@pytest.fixture
def drawloom_build() -> Callable[..., Any]:
    """Return `drawloom.testing.build`: build one component with the checks of a recipe."""
    from drawloom.graph import testing

    return testing.build


@pytest.fixture
def drawloom_fake() -> Callable[..., Any]:
    """Return `drawloom.testing.fake`: make an object implementing a port and recording its calls."""
    from drawloom.graph import testing

    return testing.fake


@pytest.fixture
def drawloom_check_port() -> Callable[..., None]:
    """Return `drawloom.testing.check_port`: check an implementation against a port's contract."""
    from drawloom.graph import testing

    return testing.check_port


@pytest.fixture
def drawloom_opened() -> Iterator[Callable[[Any], Any]]:
    """Return a function for opening a component, or entering a container, until the test ends."""
    with ExitStack() as stack:

        def open_item(item: Any) -> Any:
            if hasattr(item, "__enter__"):
                return stack.enter_context(item)
            if hasattr(item, "close"):
                stack.callback(item.close)
            if hasattr(item, "open"):
                item.open()
            return item

        yield open_item
