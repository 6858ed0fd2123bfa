"""
The testing API as fixtures. pytest finds this module by an entry point when drawloom is installed.

Every run of pytest in the environment loads this module. So it imports nothing heavy, and its fixtures have a prefix,
except for `prove`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest


@pytest.fixture
def drawloom_build() -> Callable[..., Any]:
    """Return `drawloom.testing.build`: build one component with a recipe's checks."""
    from drawloom import testing

    return testing.build


@pytest.fixture
def drawloom_fake() -> Callable[..., Any]:
    """Return `drawloom.testing.fake`: make an object implementing a port and recording its calls."""
    from drawloom import testing

    return testing.fake


@pytest.fixture
def drawloom_check_port() -> Callable[..., None]:
    """Return `drawloom.testing.check_port`: check an implementation against a port's contract."""
    from drawloom import testing

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


@pytest.fixture(scope="session")
def prove() -> Iterator[Callable[..., None]]:
    """Return `drawloom.testing.prove`, whose processes are shared by all tests."""
    from drawloom import testing
    from drawloom.components.proving.prover import Prover  # imports torch

    with Prover() as prover:
        yield partial(testing.prove, prover=prover)
