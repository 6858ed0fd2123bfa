"""Paused garbage collection."""

import gc
from collections.abc import Iterator

import pytest

from drawloom.graph.garbage import pause_collection


@pytest.fixture(params=[True, False], ids=["on", "off"])
def was_on(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Collection turned on or off beforehand, and afterwards as it was before the test."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_collection_is_as_it_was_after_a_pause(was_on: bool) -> None:
    """It is off inside, also after an inner pause, and what it was afterwards, also after an error."""
    with pytest.raises(KeyError), pause_collection():
        with pause_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() is was_on


def test_a_decorated_function_pauses_collection_at_every_call(was_on: bool) -> None:
    """The decorator serves any number of calls, one inside another."""

    @pause_collection()
    def off(depth: int) -> bool:
        return not gc.isenabled() and (depth == 0 or off(depth - 1))

    assert off(2) and gc.isenabled() is was_on
    assert off(0) and gc.isenabled() is was_on
