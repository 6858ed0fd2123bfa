"""Paused garbage collection."""

import gc
from collections.abc import Iterator

import pytest

from drawloom.graph.garbage import pause_garbage_collection


@pytest.fixture(params=[True, False], ids=["on", "off"])
def was_on(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Turn collection on or off before the test, and restore it after the test."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_a_pause_restores_collection(was_on: bool) -> None:
    """Collection is off inside, also after an inner pause, and restored afterwards, also after an error."""
    with pytest.raises(KeyError), pause_garbage_collection():
        with pause_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() is was_on


def test_a_decorated_function_pauses_collection_at_every_call(was_on: bool) -> None:
    """A decorated function pauses collection in any number of nested calls."""

    @pause_garbage_collection()
    def is_off(depth: int) -> bool:
        return not gc.isenabled() and (depth == 0 or is_off(depth - 1))

    assert is_off(2) and gc.isenabled() is was_on
    assert is_off(0) and gc.isenabled() is was_on
