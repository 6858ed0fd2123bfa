"""Dispatching events to listeners."""

from typing import get_args

import attrs
import pytest

from drawloom.components.ports.run import Event, EventKind
from drawloom.components.run.events import EventDispatcher
from drawloom.graph import Every


@attrs.define
class Recorder:
    """A recorder of events."""

    kinds: list[str] = attrs.field(factory=list)

    def on_event(self, event: Event) -> None:
        self.kinds.append(event.kind)


@attrs.define
class Fails:
    """A listener that counts its events, and raises."""

    error: BaseException
    times: int = 0

    def on_event(self, event: Event) -> None:
        self.times += 1
        raise self.error


def test_every_listener_gets_every_event() -> None:
    """Every listener gets the events in order."""
    listeners = {"a": Recorder(), "b": Recorder()}
    dispatcher = EventDispatcher(listeners=Every(listeners))
    dispatcher.emit(Event("run_started"))
    dispatcher.emit(Event("run_ended"))
    assert [listener.kinds for listener in listeners.values()] == [["run_started", "run_ended"]] * 2


def test_a_listener_gets_only_the_events_it_observes() -> None:
    """A listener gets only the event kinds named by its class."""

    class Observer(Recorder):
        observes = ("step_ended", "run_ended")

    listener = Observer()
    dispatcher = EventDispatcher(listeners=Every({"a": listener}))
    for kind in get_args(EventKind):
        dispatcher.emit(Event(kind))
    assert listener.kinds == ["step_ended", "run_ended"]


def test_a_listener_that_raises_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """It gets one event, and is logged once with the traceback; later listeners get every event."""
    bad, good = Fails(ValueError("oh")), Recorder()
    dispatcher = EventDispatcher(listeners=Every({"bad": bad, "good": good}))
    for _ in range(3):
        dispatcher.emit(Event("run_started"))
    assert (bad.times, len(good.kinds)) == (1, 3)
    (record,) = caplog.records
    assert (record.levelname, record.message.split()[0]) == ("ERROR", "[bad]")
    assert record.exc_info and record.exc_info[1] is bad.error


def test_a_keyboard_interrupt_is_not_swallowed() -> None:
    """KeyboardInterrupt inside a listener ends the run."""
    dispatcher = EventDispatcher(listeners=Every({"a": Fails(KeyboardInterrupt())}))
    with pytest.raises(KeyboardInterrupt):
        dispatcher.emit(Event("run_started"))
