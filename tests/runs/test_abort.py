"""A rank fails: all others end with it within seconds, and one message names the rank, where, and why."""

import re
from pathlib import Path

import pytest

from support.aborts import WHERE, output_lines, run_with_fault

LIMITS = ("listeners.timeouts.step=2", "listeners.timeouts.first_step=30")


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_user_error_is_printed_once_with_rank_and_location(folder: Path, ranks: int) -> None:
    """All ranks exit with the error's code, their logs name the failed rank, and a recipe warning is printed once."""
    failures, outcomes, seconds = run_with_fault(folder, ranks, "refuse")
    assert failures == {} and [outcome.code for outcome in outcomes.values()] == [2] * ranks
    assert output_lines(outcomes) == [f"rank 1, {WHERE}: there is no luck today"]
    assert sum(outcome.text.count("warning: ") for outcome in outcomes.values()) == 1, outcomes
    assert "there is no luck today" in (folder / "runs/tiny/log/rank-0.log").read_text()
    assert seconds < 5


def test_a_rank_that_hangs_while_closing_does_not_delay_the_others(folder: Path) -> None:
    """Other ranks end without waiting for its connections to break, and it ends with the error's exit code."""
    failures, outcomes, seconds = run_with_fault(folder, 2, "refuse and hang")
    assert failures == dict.fromkeys(failures, "died with exit code 2") and 1 in failures
    assert seconds < 5
    assert "no luck" in (folder / "runs/tiny/log/rank-0.log").read_text()
    assert output_lines(outcomes) == []  # what rank 1 printed is lost with it


def test_a_bug_is_printed_once_with_its_traceback(folder: Path) -> None:
    """The terminal and the failed rank's log have the traceback."""
    failures, outcomes, seconds = run_with_fault(folder, 3, "fault")
    assert failures == {} and [outcome.code for outcome in outcomes.values()] == [1] * 3
    lines = output_lines(outcomes)
    assert lines[0].startswith("Traceback") and lines.count(lines[0]) == 1
    assert lines[-1] == f"rank 1, {WHERE}: ZeroDivisionError: division by zero"
    assert "Traceback" in outcomes[1].text and "Traceback" in (folder / "runs/tiny/log/rank-1.log").read_text()
    assert seconds < 5


@pytest.mark.parametrize(("ranks", "words"), [(2, ()), (3, ()), (2, ("mesh.data_shard=2",))])
def test_a_killed_rank_is_named_once(folder: Path, ranks: int, words: tuple[str, ...]) -> None:
    """Another rank names it, and no rank reports connection resets, in our collectives or in FSDP's."""
    failures, outcomes, seconds = run_with_fault(folder, ranks, "kill", *words)
    assert failures == {1: "died with exit code -9"} and {outcome.code for outcome in outcomes.values()} == {1}
    [line] = output_lines(outcomes)
    assert re.fullmatch(r"rank 1 \(process \d+\) is gone: it was killed, or it crashed", line)
    assert seconds < 5


@pytest.mark.parametrize("words", [pytest.param((), marks=pytest.mark.soak), ("mesh.data_shard=3",)])
def test_a_stopped_rank_is_named_once(folder: Path, words: tuple[str, ...]) -> None:
    """Another rank names it once the step's time limit has passed."""
    failures, outcomes, seconds = run_with_fault(folder, 3, "stop", *LIMITS, *words)
    assert failures == {1: "was not waited for"} and {outcome.code for outcome in outcomes.values()} == {1}
    [line] = [line for line in output_lines(outcomes) if "is slow" not in line]
    assert "rank 1 does not answer" in line and "step 4, phase [" in line
    assert 2 <= seconds < 9
