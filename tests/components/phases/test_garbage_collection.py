"""Garbage collection at chosen steps."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.phases.garbage_collection import CollectGarbage
from drawloom.components.ports.run import Event, Step
from drawloom.components.run.events import EventDispatcher
from drawloom.graph import Every
from support.checkpoints import StateNode, checkpointer


class Cycle:
    """An object in a reference cycle with itself."""

    def __init__(self) -> None:
        self.me = self


def _cycle() -> "weakref.ref[Cycle]":
    return weakref.ref(Cycle())


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Spare collections the objects of other tests, and restore automatic collection after the test."""
    on = gc.isenabled()
    gc.freeze()  # all tests before leave millions, and to walk through them takes half a second
    yield
    (gc.enable if on else gc.disable)()


def test_only_chosen_steps_collect() -> None:
    """A cycle made before step 1 survives it, and is collected at step 2."""
    garbage = CollectGarbage(every=2)
    garbage.open()
    cycle = _cycle()
    garbage.run_phase(Step(1, 9))
    assert not gc.isenabled()
    assert cycle() is not None
    garbage.run_phase(Step(2, 9))
    assert cycle() is None
    garbage.close()


@pytest.mark.parametrize("before_saves", [False, True])
def test_old_garbage_is_collected_before_a_checkpoint_is_taken(tmp_path: Path, before_saves: bool) -> None:
    """A cycle in the oldest generation, ignored by `every`, is gone when a checkpoint reads the state."""
    garbage = CollectGarbage(every="never", before_saves=before_saves)
    garbage.open()
    instance = Cycle()
    cycle, seen = weakref.ref(instance), list[bool]()
    gc.collect()  # what survives is of the oldest generation

    class Reader(StateNode):
        def state_dict(self) -> dict[str, Any]:
            seen.append(cycle() is None)
            return {"step": 1}

    events = EventDispatcher(listeners=Every({"garbage_collection": garbage}))
    node = checkpointer(tmp_path, {"reader": Reader()})
    del instance
    garbage.run_phase(Step(1, 9))
    events.emit(Event("saving_started", Step(1, 9)))
    node.save(Step(1, 9))
    garbage.close()
    assert seen and all(is_collected is before_saves for is_collected in seen)


def test_opening_and_closing_collect() -> None:
    """Cycles made before either are collected by it."""
    before = _cycle()
    garbage = CollectGarbage(every="never")
    garbage.open()
    after = _cycle()
    assert before() is None
    garbage.close()
    assert after() is None


@pytest.mark.parametrize("on", [True, False])
def test_closing_restores_automatic_collection(on: bool) -> None:
    """If automatic collection was off, it stays off."""
    (gc.enable if on else gc.disable)()
    garbage = CollectGarbage()
    garbage.open()
    garbage.close()
    assert gc.isenabled() is on
