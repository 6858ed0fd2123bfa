"""Timeouts of collectives and steps."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from drawloom.components.distributed.guard import guard
from drawloom.components.listeners.time_limits import GUARD_MARGIN, WATCHDOG_MARGIN
from drawloom.components.listeners.timeouts import Timeouts
from drawloom.components.ports.run import Event, EventKind, Step
from support.doubles import Exit
from support.folders import Folder


@attrs.define
class FakeProcesses:
    """A recorder of timeouts and locations."""

    limits: list[float] = attrs.field(factory=list)
    fails: bool = False
    location: str = ""
    failures: list[str] = attrs.field(factory=list)

    def set_timeout(self, seconds: float) -> None:
        if self.fails:
            raise RuntimeError("no such group")
        self.limits.append(seconds)

    def record_step_and_phase(self, location: str) -> None:
        self.location = location

    def diagnose_hang(self) -> str:
        return "rank 7 does not answer"

    def fail_ranks_and_must_exit(self, text: str) -> bool:
        self.failures.append(text)
        return True


@pytest.fixture
def processes() -> FakeProcesses:
    """Return the processes of ranks."""
    return FakeProcesses()


@pytest.fixture
def timeouts(tmp_path: Path, one_rank: Any, processes: Any) -> Iterator[Timeouts]:
    """Yield an open node with limits of 30, 10 and 20 seconds whose exit is recorded."""
    timeouts = Timeouts(
        processes=processes, folder=Folder(tmp_path), mesh=one_rank, first_step=30.0, step=10.0, saving=20.0
    )
    limits = timeouts.limits
    limits.exit, limits.tick, limits.watchdog_margin = Exit(), 0.01, 0.0
    timeouts.open()
    yield timeouts
    timeouts.close()


def _emit(timeouts: Timeouts, kind: EventKind, index: int = 1, phase: str = "") -> None:
    timeouts.on_event(Event(kind, Step(index, 4), phase))


def test_the_collective_timeout_follows_the_run(timeouts: Timeouts, processes: FakeProcesses) -> None:
    """Long for the first step, then short, longer while saving, short again, and longer after the last step."""
    timeouts.on_event(Event("run_started"))
    _emit(timeouts, "step_started", 1)
    _emit(timeouts, "saving_started", 1)
    _emit(timeouts, "saving_ended", 1)
    assert processes.limits == [30, 20, 30]
    _emit(timeouts, "step_ended", 1)
    assert processes.limits == [30, 20, 30, 10]
    for index in (2, 3):
        _emit(timeouts, "step_started", index)
        _emit(timeouts, "step_ended", index)
    assert processes.limits == [30, 20, 30, 10]
    _emit(timeouts, "saving_started", 3)
    _emit(timeouts, "saving_ended", 3)
    _emit(timeouts, "step_started", 4)
    _emit(timeouts, "step_ended", 4)
    assert processes.limits == [30, 20, 30, 10, 20, 10, 20]


def test_the_location_is_the_step_and_phase(timeouts: Timeouts, processes: FakeProcesses) -> None:
    """The location has the step, and the phase while it is in one."""
    _emit(timeouts, "phase_started", 3, "clip")
    assert processes.location == "step 3, phase [clip]"
    _emit(timeouts, "phase_ended", 3, "clip")
    assert processes.location == "step 3"


def test_the_watchdog_expires_after_the_collective_timeout(timeouts: Timeouts) -> None:
    """The process exits some seconds after a blocked rank has raised an error that names the other."""
    timeouts.limits.watchdog_margin, timeouts.limits.step = 0.3, 0.05
    _emit(timeouts, "step_ended", 1)
    _emit(timeouts, "step_started", 2)
    assert not timeouts.limits.exit.called.wait(0.2)  # type: ignore[attr-defined]
    assert timeouts.limits.exit.called.wait(5)  # type: ignore[attr-defined]


def test_a_step_beyond_its_limit_ends_the_process(
    timeouts: Timeouts, processes: FakeProcesses, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """
    The failure names rank, step, phase and limit, and the hang diagnosis; the stacks, this function's among them, are
    in the rank's log. A warning comes at half of the limit.
    """
    timeouts.limits.step = 0.05
    timeouts.on_event(Event("run_started"))
    _emit(timeouts, "step_ended", 1)
    _emit(timeouts, "step_started", 2)
    _emit(timeouts, "phase_started", 2, "clip")
    assert timeouts.limits.exit.called.wait(10)  # type: ignore[attr-defined]
    timeouts.close()
    assert timeouts.limits.exit.codes == [1]  # type: ignore[attr-defined]
    path = tmp_path / "log" / "rank-0.log"
    assert caplog.messages == [
        "rank 0 is slow: step 2 has taken more than 0.025 s in phase [clip]; its limit is 0.05 s",
    ]
    assert processes.failures == [
        "rank 0 hangs: step 2 took more than 0.05 s in phase [clip]; rank 7 does not answer; stacks are in "
        + str(path),
    ]
    assert "test_a_step_beyond_its_limit_ends_the_process" in path.read_text()


def test_the_first_step_has_its_own_limit(timeouts: Timeouts) -> None:
    """With almost no time for later steps the first one does not expire, and the second does."""
    timeouts.limits.step = 0.02
    timeouts.on_event(Event("run_started"))
    _emit(timeouts, "step_started", 1)
    assert not timeouts.limits.exit.called.wait(0.2)  # type: ignore[attr-defined]
    _emit(timeouts, "step_ended", 1)
    _emit(timeouts, "step_started", 2)
    assert timeouts.limits.exit.called.wait(10)  # type: ignore[attr-defined]


def test_after_the_run_there_is_no_limit(timeouts: Timeouts) -> None:
    """Time after run_ended is not limited."""
    timeouts.limits.saving = 0.5
    _emit(timeouts, "step_ended", 4)
    timeouts.on_event(Event("run_ended"))
    assert not timeouts.limits.exit.called.wait(0.8)  # type: ignore[attr-defined]


def test_after_an_error_there_is_no_limit(timeouts: Timeouts, processes: FakeProcesses) -> None:
    """It gets no events after it raised, so an old limit must not end a healthy run."""
    timeouts.limits.step = 0.5
    _emit(timeouts, "step_ended", 1)
    processes.fails = True
    with pytest.raises(RuntimeError, match="no such group"):
        _emit(timeouts, "saving_started", 2)
    assert not timeouts.limits.exit.called.wait(0.8)  # type: ignore[attr-defined]


def test_a_log_that_hangs_does_not_prevent_the_exit(
    timeouts: Timeouts, processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process exits even if writing the report hangs."""
    gate = threading.Event()
    monkeypatch.setattr("drawloom.components.listeners.hang_report.REPORT_TIMEOUT", 0.05)
    monkeypatch.setattr(FakeProcesses, "fail_ranks_and_must_exit", lambda *_: gate.wait(10))
    timeouts.limits.first_step = 0.01
    timeouts.on_event(Event("run_started"))
    assert timeouts.limits.exit.called.wait(5)  # type: ignore[attr-defined]
    gate.set()


@pytest.mark.parametrize("stage", ["open", "close"])
def test_a_component_that_hangs_while_it_opens_or_closes_is_named(
    timeouts: Timeouts, processes: FakeProcesses, caplog: pytest.LogCaptureFixture, stage: str
) -> None:
    """It is named in a warning, then in the failure that ends the process; other ranks learn where this one is."""
    timeouts.limits.opening = 0.05
    with timeouts.lifecycle_context(stage, "corpus"):
        assert processes.location == f"{stage}() of [corpus]"
        assert timeouts.limits.exit.called.wait(10)  # type: ignore[attr-defined]
    where = f"{stage}() of [corpus]"
    assert processes.location == ""
    assert caplog.messages == [f"rank 0 is slow: {where} has taken more than 0.025 s; its limit is 0.05 s"]
    failed = f"rank 0 hangs: {where} took more than 0.05 s; rank 7 does not answer; stacks are in "
    assert processes.failures[0].startswith(failed)


def test_between_components_there_is_no_limit(timeouts: Timeouts) -> None:
    """A notebook may open a run, and wait before it trains."""
    timeouts.limits.opening = 0.5
    with timeouts.lifecycle_context("open", "corpus"):
        pass
    assert not timeouts.limits.exit.called.wait(0.8)  # type: ignore[attr-defined]


def test_a_component_that_logs_has_its_time_again(timeouts: Timeouts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenization takes hours, and logs its progress."""
    allowed: list[float | None] = []
    monkeypatch.setattr(
        timeouts.limits._watchdog, "start_limit", lambda seconds, slow_after_seconds: allowed.append(seconds)
    )
    with timeouts.lifecycle_context("open", "corpus"):
        logging.getLogger("drawloom.data").warning("1 of 9 MB tokenized")
    logging.getLogger("drawloom.data").warning("not the component's")
    assert allowed == [timeouts.opening, timeouts.opening, None]


def test_components_that_open_before_the_watchdog_have_the_guard(
    processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has their limit and their name, and nothing asks the mesh, which may not be open."""
    told: list[tuple[float | None, str]] = []
    monkeypatch.setattr(guard, "set_time_limit", lambda seconds, text="": told.append((seconds, text)))
    monkeypatch.setenv("RANK", "3")
    nothing: Any = None
    timeouts = Timeouts(processes=processes, folder=nothing, mesh=nothing, opening=5.0)
    with timeouts.lifecycle_context("open", "mesh"):
        assert processes.location == "open() of [mesh]"
    message = "rank 3 hangs: open() of [mesh] took more than 5 s"
    assert told == [(5.0 + WATCHDOG_MARGIN + GUARD_MARGIN, message), (None, told[-1][1])]


def test_the_guard_has_each_limit_and_its_message(timeouts: Timeouts, monkeypatch: pytest.MonkeyPatch) -> None:
    """It acts after the watchdog, which has more to say; without a limit it does not act."""
    told: list[tuple[float | None, str]] = []
    monkeypatch.setattr(guard, "set_time_limit", lambda seconds, text="": told.append((seconds, text)))
    with timeouts.lifecycle_context("open", "corpus"):
        pass
    limit = timeouts.opening + GUARD_MARGIN
    message = f"rank 0 hangs: open() of [corpus] took more than {timeouts.opening:g} s"
    assert [seconds for seconds, _ in told] == [limit, None]
    assert told[0][1] == f"{message}, and keeps Python's threads from running"
