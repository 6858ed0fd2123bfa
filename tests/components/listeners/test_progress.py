"""The progress bar."""

import io
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from rich.console import Console

from drawloom.components.listeners.logging import RunLogging
from drawloom.components.listeners.progress import ProgressBar
from drawloom.components.ports.intervals import Interval
from drawloom.components.ports.run import Event, Step
from drawloom.graph import Every
from support.doubles import FakeClock, Machine
from support.folders import Folder
from support.steps import LateState, make_skipped_step


@attrs.frozen
class Second:
    """A world group as rank 1 sees it."""

    rank: int = 1


@pytest.fixture
def screen() -> io.StringIO:
    """Return a buffer that records the terminal's output."""
    return io.StringIO()


@pytest.fixture
def bar(one_rank: Any, screen: io.StringIO) -> Iterator[ProgressBar]:
    """Yield an open bar on a terminal of 100 columns."""
    bar = ProgressBar(mesh=one_rank, device=Machine(used=800_000_000))
    bar.clock = FakeClock()
    bar.console = _terminal(screen)
    bar.open()
    yield bar
    bar.close()


def _terminal(screen: io.StringIO, is_one: bool = True) -> Console:
    return Console(file=screen, force_terminal=is_one, width=100, color_system=None, legacy_windows=False)


def _take(bar: ProgressBar, step: Step, seconds: float = 2.0) -> None:
    bar.on_event(Event("step_started", step))
    start = bar.clock()
    bar.clock.now += seconds  # type: ignore[attr-defined]
    step.interval = Interval(start, bar.clock())
    bar.on_event(Event("step_ended", step))


def test_the_bar_shows_step_loss_speed_and_time_remaining(bar: ProgressBar, screen: io.StringIO) -> None:
    """After 4 of 10 steps with 2 seconds and 1000 tokens apiece, 12 seconds remain."""
    for index in range(1, 5):
        _take(bar, Step(index, 10, state={"tokens": float(1000), "loss": 2.34567}))
    drawn = screen.getvalue().rsplit("\r", 1)[-1]
    for part in ("step 4/10", "loss 2.3457", "500 tokens/s", "0:00:12"):
        assert part in drawn


def test_validation_loss_rate_and_memory_stay_beside_the_bar(bar: ProgressBar, screen: io.StringIO) -> None:
    """The validation loss of an earlier step is shown until there is another; all fit into 100 columns."""
    outputs = {"loss": 2.34567, "lr": 0.0004}
    _take(bar, Step(1, 10, state={"tokens": float(1000), **outputs, "validation_loss": 3.5}))
    _take(bar, Step(2, 10, state={"tokens": 1000.0, **outputs}))
    drawn = screen.getvalue().rsplit("\r", 1)[-1]
    assert "loss 2.3457  val 3.5000  lr 0.00040  800 MB  500 tokens/s" in drawn


def test_a_resumed_bar_starts_at_the_resumed_step(bar: ProgressBar, screen: io.StringIO) -> None:
    """The first step is shown at its position, with its own speed."""
    _take(bar, Step(8, 10))
    assert "step 8/10" in screen.getvalue()
    assert "step 1/10" not in screen.getvalue()


def test_a_skipped_step_shows_no_loss(bar: ProgressBar, screen: io.StringIO) -> None:
    """The bar shows "skipped" in place of the loss."""
    _take(bar, make_skipped_step(1, 1, state={"loss": float("nan")}))
    assert "loss skipped" in screen.getvalue()


def test_a_late_step_shows_the_loss_of_the_one_before(bar: ProgressBar, screen: io.StringIO) -> None:
    """The bar does not wait for a GPU, but for the last step."""
    for index in (1, 2, 3):
        state = LateState({"loss": torch.tensor(float(index)), "tokens": torch.tensor(20.0)})
        step = Step(index, 3, state)
        _take(bar, step)
        if index == 2:
            assert not state.is_on_host and "step 2/3" in screen.getvalue()
            assert screen.getvalue().count("loss 1.0000") and "loss 2.0000" not in screen.getvalue()
    assert "loss 3.0000" in screen.getvalue() and "10 tokens/s" in screen.getvalue()


def test_fast_steps_do_not_each_refresh_the_bar(bar: ProgressBar, screen: io.StringIO) -> None:
    """A thousand steps of a millisecond are about ten refreshes, including the last step's."""
    for index in range(1, 1001):
        _take(bar, Step(index, 1000), seconds=0.001)
    assert 5 < screen.getvalue().count("step ") < 20
    assert "step 1000/1000" in screen.getvalue()


def test_a_stopped_run_leaves_its_last_step_shown(bar: ProgressBar, screen: io.StringIO) -> None:
    """The last step is shown even if it was too fast to be refreshed."""
    for index in (1, 2):
        _take(bar, Step(index, 9), seconds=0.001)
    bar.close()
    assert screen.getvalue().rsplit("\r", 1)[-1].startswith("\x1b[2Kstep 2/9")


def test_step_lines_are_hidden_while_the_bar_is_shown(
    bar: ProgressBar, screen: io.StringIO, tmp_path: Path, one_rank: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other lines and warnings appear above the bar; the log has all; step lines return after the last step."""
    logs = RunLogging(folder=Folder(tmp_path), mesh=one_rank, launches=Every())
    logs.open()
    log = logging.getLogger("drawloom.run")
    bar.on_event(Event("step_started", Step(1, 2)))
    log.info("hidden", extra={"step_line": True})
    log.info("news")
    log.warning("mind")
    bar.on_event(Event("step_ended", Step(2, 2)))
    log.info("line", extra={"step_line": True})
    logs.close()
    assert "hidden" not in screen.getvalue() + "".join(capsys.readouterr())
    assert all(f"{line}\n" in screen.getvalue() for line in ("news", "warning: mind"))
    text = (tmp_path / "log" / "rank-0.log").read_text()
    assert [word in text for word in ("hidden", "news", "mind", "line")] == [True] * 4


def test_after_close_step_lines_are_printed_again(
    bar: ProgressBar, tmp_path: Path, one_rank: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output and error are restored, and step lines are printed."""
    before = sys.stdout, sys.stderr
    logs = RunLogging(folder=Folder(tmp_path), mesh=one_rank, launches=Every())
    logs.open()
    bar.on_event(Event("step_started", Step(1, 2)))
    bar.close()
    logging.getLogger("drawloom.run").info("line", extra={"step_line": True})
    logs.close()
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out.endswith("line\n")


@pytest.mark.parametrize("case", ["no terminal", "another rank"])
def test_only_rank_0_on_a_terminal_has_a_bar(
    case: str, one_rank: Any, mesh_of: Callable[..., Any], screen: io.StringIO
) -> None:
    """Output to a file has no bar, and on a terminal only rank 0 has one."""
    bar = ProgressBar(
        mesh=one_rank if case == "no terminal" else mesh_of(world=Second()), device=Machine(used=800_000_000)
    )
    bar.console = _terminal(screen, is_one=case != "no terminal")
    bar.clock = FakeClock()
    bar.open()
    _take(bar, Step(1, 1))
    bar.close()
    assert screen.getvalue() == ""


def test_force_color_does_not_make_a_terminal(
    one_rank: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FORCE_COLOR does not turn the bar on."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    bar = ProgressBar(mesh=one_rank, device=Machine(used=800_000_000))
    bar.open()
    _take_real(bar)
    bar.close()
    assert capsys.readouterr().out == ""


def _take_real(bar: ProgressBar) -> None:
    step = Step(1, 1)
    bar.on_event(Event("step_started", step))
    bar.on_event(Event("step_ended", step))
