"""A rank fails: all others end with it within seconds, and one message names the rank, where, and why."""

import re
from pathlib import Path

import pytest

from support.aborts import WHERE, output_lines, run_with_fault

LIMITS = ("listeners.timeouts.step=2", "listeners.timeouts.first_step=30")


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_user_error_is_printed_once_with_rank_and_location(place: Path, ranks: int) -> None:
    """All ranks exit with its code, and their logs name the failed rank; a warning of the recipe is printed once."""
    failures, outcomes, seconds = run_with_fault(place, ranks, "refuse")
    assert failures == {} and [outcome.code for outcome in outcomes.values()] == [2] * ranks
    assert output_lines(outcomes) == [f"rank 1, {WHERE}: there is no luck today"]
    assert sum(outcome.text.count("warning: ") for outcome in outcomes.values()) == 1, outcomes
    assert "there is no luck today" in (place / "runs/tiny/log/rank-0.log").read_text()
    assert seconds < 5


def test_a_rank_that_hangs_while_closing_does_not_delay_the_others(place: Path) -> None:
    """The others do not wait for its connections to break, and it is killed."""
    failures, outcomes, seconds = run_with_fault(place, 2, "refuse and hang")
    assert failures == dict.fromkeys(failures, "died with exit code 2") and 1 in failures
    assert seconds < 5
    assert "no luck" in (place / "runs/tiny/log/rank-0.log").read_text()
    assert output_lines(outcomes) == []  # what rank 1 printed is lost with it


def test_a_bug_is_printed_once_with_its_traceback(place: Path) -> None:
    """The traceback is on the terminal and in the log of the failed rank."""
    failures, outcomes, seconds = run_with_fault(place, 3, "fault")
    assert failures == {} and [outcome.code for outcome in outcomes.values()] == [1] * 3
    lines = output_lines(outcomes)
    assert lines[0].startswith("Traceback") and lines.count(lines[0]) == 1
    assert lines[-1] == f"rank 1, {WHERE}: ZeroDivisionError: division by zero"
    assert "Traceback" in outcomes[1].text and "Traceback" in (place / "runs/tiny/log/rank-1.log").read_text()
    assert seconds < 5


@pytest.mark.parametrize(("ranks", "words"), [(2, ()), (3, ()), (2, ("mesh.data_shard=2",))])
def test_a_killed_rank_is_named_once(place: Path, ranks: int, words: tuple[str, ...]) -> None:
    """One of the others names it; no rank reports connection resets, in our collectives or in those of FSDP."""
    failures, outcomes, seconds = run_with_fault(place, ranks, "kill", *words)
    assert failures == {1: "died with exit code -9"} and {outcome.code for outcome in outcomes.values()} == {1}
    [line] = output_lines(outcomes)
    assert re.fullmatch(r"rank 1 \(process \d+\) is gone: it was killed, or it crashed", line)
    assert seconds < 5


@pytest.mark.parametrize("words", [(), ("mesh.data_shard=3",)])
def test_a_stopped_rank_is_named_once(place: Path, words: tuple[str, ...]) -> None:
    """One of the others names it, when the limit of a step is over."""
    failures, outcomes, seconds = run_with_fault(place, 3, "stop", *LIMITS, *words)
    assert failures == {1: "was not waited for"} and {outcome.code for outcome in outcomes.values()} == {1}
    [line] = [line for line in output_lines(outcomes) if "is slow" not in line]
    assert "rank 1 does not answer" in line and "step 4, phase [" in line
    assert 2 <= seconds < 9
