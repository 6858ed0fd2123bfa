"""Events on their way to listeners."""

import attrs
import pytest

from drawloom.components.ports.run import Event
from drawloom.components.run.events import Dispatcher
from drawloom.graph import Every


@attrs.define
class Notes:
    """A listener that notes what it hears."""

    heard: list[str] = attrs.field(factory=list)

    def on_event(self, event: Event) -> None:
        self.heard.append(event.kind)


@attrs.define
class Fails:
    """A listener that counts, and raises."""

    error: BaseException
    times: int = 0

    def on_event(self, event: Event) -> None:
        self.times += 1
        raise self.error


def test_every_listener_is_told_every_event() -> None:
    """In the order of events."""
    listeners = {"a": Notes(), "b": Notes()}
    dispatcher = Dispatcher(listeners=Every(listeners))
    dispatcher.emit(Event("run_started"))
    dispatcher.emit(Event("run_ended"))
    assert [listener.heard for listener in listeners.values()] == [["run_started", "run_ended"]] * 2


def test_a_listener_that_raises_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, its node is named once with the traceback, and those behind it hear everything."""
    bad, good = Fails(ValueError("oh")), Notes()
    dispatcher = Dispatcher(listeners=Every({"bad": bad, "good": good}))
    for _ in range(3):
        dispatcher.emit(Event("run_started"))
    assert (bad.times, len(good.heard)) == (1, 3)
    (record,) = caplog.records
    assert (record.levelname, record.message.split()[0]) == ("ERROR", "[bad]")
    assert record.exc_info and record.exc_info[1] is bad.error


def test_an_interruption_is_no_failure() -> None:
    """Whoever interrupts the process means the run, not the listener that was at work."""
    dispatcher = Dispatcher(listeners=Every({"a": Fails(KeyboardInterrupt())}))
    with pytest.raises(KeyboardInterrupt):
        dispatcher.emit(Event("run_started"))
