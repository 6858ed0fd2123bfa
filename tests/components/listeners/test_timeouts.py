"""How long a step may take."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from drawloom.components.listeners.timeouts import Timeouts
from drawloom.components.ports.run import Event, EventKind, Step


@attrs.frozen
class Folder:
    """A run folder."""

    folder: Path


@attrs.define
class Groups:
    """Notes the limits that groups of ranks get."""

    limits: list[float] = attrs.field(factory=list)
    fails: bool = False
    place: str = ""
    told: list[str] = attrs.field(factory=list)

    def set_timeout(self, seconds: float) -> None:
        if self.fails:
            raise RuntimeError("no such group")
        self.limits.append(seconds)

    def set_location(self, place: str) -> None:
        self.place = place

    def diagnose(self) -> str:
        return "rank 7 does not answer"

    def fail(self, text: str) -> None:
        self.told.append(text)


@attrs.define
class Exit:
    """Stands in for the end of the process."""

    codes: list[int] = attrs.field(factory=list)
    called: threading.Event = attrs.field(factory=threading.Event)

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.called.set()


@pytest.fixture
def groups() -> Groups:
    """The groups of ranks."""
    return Groups()


@pytest.fixture
def timeouts(tmp_path: Path, one_rank: Any, groups: Groups) -> Iterator[Timeouts]:
    """Open, with 30, 10 and 20 seconds, and an end of the process that is none."""
    timeouts = Timeouts(
        processes=groups, folder=Folder(tmp_path), mesh=one_rank, first_step=30.0, step=10.0, saving=20.0
    )
    timeouts.exit, timeouts.tick, timeouts.watchdog_margin = Exit(), 0.01, 0.0
    timeouts.open()
    yield timeouts
    timeouts.close()


def _tell(timeouts: Timeouts, moment: EventKind, index: int = 1, phase: str = "") -> None:
    timeouts.on_event(Event(moment, Step(index, 4), phase))


def test_groups_wait_as_long_as_what_the_run_is_doing(timeouts: Timeouts, groups: Groups) -> None:
    """Long for the first step, then short, longer while saving, short again, and longer after the last step."""
    timeouts.on_event(Event("run_started"))
    _tell(timeouts, "step_started", 1)
    _tell(timeouts, "saving_started", 1)
    _tell(timeouts, "saving_ended", 1)
    assert groups.limits == [30, 20, 30]
    _tell(timeouts, "step_ended", 1)
    assert groups.limits == [30, 20, 30, 10]
    for index in (2, 3):
        _tell(timeouts, "step_started", index)
        _tell(timeouts, "step_ended", index)
    assert groups.limits == [30, 20, 30, 10]
    _tell(timeouts, "saving_started", 3)
    _tell(timeouts, "saving_ended", 3)
    _tell(timeouts, "step_started", 4)
    _tell(timeouts, "step_ended", 4)
    assert groups.limits == [30, 20, 30, 10, 20, 10, 20]


def test_others_can_be_told_where_a_rank_is(timeouts: Timeouts, groups: Groups) -> None:
    """The step, and the phase while it is in one."""
    _tell(timeouts, "phase_started", 3, "clip")
    assert groups.place == "step 3, phase [clip]"
    _tell(timeouts, "phase_ended", 3, "clip")
    assert groups.place == "step 3"


def test_whoever_waits_for_others_can_say_so_first(timeouts: Timeouts) -> None:
    """The process ends some seconds after a rank has given up waiting for another, which names it."""
    timeouts.watchdog_margin, timeouts.step = 0.3, 0.05
    _tell(timeouts, "step_ended", 1)
    _tell(timeouts, "step_started", 2)
    assert not timeouts.exit.called.wait(0.2)  # type: ignore[attr-defined]
    assert timeouts.exit.called.wait(5)  # type: ignore[attr-defined]


def test_a_step_beyond_its_limit_ends_the_process(
    timeouts: Timeouts, groups: Groups, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """
    The failure names rank, step, phase and limit, and who keeps it waiting; the stacks, this function's among them, are
    in the rank's log. At half of the time there was a warning.
    """
    timeouts.step = 0.05
    timeouts.on_event(Event("run_started"))
    _tell(timeouts, "step_ended", 1)
    _tell(timeouts, "step_started", 2)
    _tell(timeouts, "phase_started", 2, "clip")
    assert timeouts.exit.called.wait(10)  # type: ignore[attr-defined]
    timeouts.close()
    assert timeouts.exit.codes == [1]  # type: ignore[attr-defined]
    path = tmp_path / "log" / "rank-0.log"
    assert caplog.messages == [
        "rank 0 is slow: step 2 takes more than 0.025 s by now in phase [clip], and its limit is 0.05 s",
    ]
    assert groups.told == [
        "rank 0 hangs: step 2 took more than 0.05 s in phase [clip]; rank 7 does not answer; stacks are in "
        + str(path),
    ]
    assert "test_a_step_beyond_its_limit_ends_the_process" in path.read_text()


def test_the_first_step_is_given_its_own_time(timeouts: Timeouts) -> None:
    """With almost no time for later steps the first one is left alone, and the second is not."""
    timeouts.step = 0.02
    timeouts.on_event(Event("run_started"))
    _tell(timeouts, "step_started", 1)
    assert not timeouts.exit.called.wait(0.2)  # type: ignore[attr-defined]
    _tell(timeouts, "step_ended", 1)
    _tell(timeouts, "step_started", 2)
    assert timeouts.exit.called.wait(10)  # type: ignore[attr-defined]


def test_after_the_run_there_is_no_limit(timeouts: Timeouts) -> None:
    """Whatever takes its time after the end is not watched."""
    timeouts.saving = 0.5
    _tell(timeouts, "step_ended", 4)
    timeouts.on_event(Event("run_ended"))
    assert not timeouts.exit.called.wait(0.8)  # type: ignore[attr-defined]


def test_failing_it_watches_no_more(timeouts: Timeouts, groups: Groups) -> None:
    """It is told nothing after it raised, so an old limit must not end a healthy run."""
    timeouts.step = 0.5
    _tell(timeouts, "step_ended", 1)
    groups.fails = True
    with pytest.raises(RuntimeError, match="no such group"):
        _tell(timeouts, "saving_started", 2)
    assert not timeouts.exit.called.wait(0.8)  # type: ignore[attr-defined]


def test_a_log_that_hangs_does_not_keep_the_process(
    timeouts: Timeouts, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message may hang where the run hangs; the process ends all the same."""
    gate = threading.Event()
    monkeypatch.setattr("drawloom.components.listeners.timeouts.REPORT_TIMEOUT", 0.05)
    monkeypatch.setattr(Groups, "fail", lambda *_: gate.wait(10))
    timeouts.first_step = 0.01
    timeouts.on_event(Event("run_started"))
    assert timeouts.exit.called.wait(5)  # type: ignore[attr-defined]
    gate.set()
