"""The first failure of any rank."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from drawloom.components.distributed import failure_monitor as alarms
from drawloom.components.distributed.failure_monitor import Alarm, Failure
from drawloom.components.distributed.rank_errors import Agreed
from drawloom.graph import UserError


@pytest.fixture
def store() -> Any:
    """What two ranks see."""
    return HashStore()


def both(store: Any, **changes: Any) -> tuple[Alarm, Alarm]:
    """The alarm of rank 0 and that of rank 1."""
    return Alarm(0, store, **changes), Alarm(1, store, **changes)


def test_the_first_is_told_and_the_others_learn_it(store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The failure of rank 1 is printed once, and is what rank 0 has, which failed a moment later."""
    zero, one = both(store)
    failure = one.ring("rank 1 has no disk", 2)
    assert failure == Failure(1, "rank 1 has no disk", 2) == zero.ring("rank 0 lost rank 1")
    assert capsys.readouterr().err == "rank 1 has no disk\n"


def test_a_rank_that_did_not_fail_learns_it_by_looking(store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints nothing, and ends with the same exit code once the time for closing is over."""
    codes: list[int] = []
    zero, one = both(store, exit=codes.append)
    zero.look()
    zero.expire()
    assert zero.failure is None
    one.ring("rank 1 has no disk", 2)
    capsys.readouterr()
    zero.look()
    zero.expire()
    assert zero.failure == one.failure and codes == [] and capsys.readouterr().err == ""


def test_who_does_not_come_to_an_end_is_ended(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time for closing, with the failure's exit code; not after it was closed."""
    monkeypatch.setattr(alarms, "MERCY", 0.05)
    codes: list[int] = []
    for each in both(store, exit=codes.append):
        each.ring("told", 3)
        time.sleep(0.06)
        each.expire()
        assert codes.pop() == 3 and not codes
        each.close()
        each.expire()
        assert codes == []


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (UserError("no room", 2), "rank 1, step 3, phase [clip]: no room", 2),
        (Agreed("rank 0: no room", 1, 1), "step 3, phase [clip]: rank 0: no room", 1),
        (ZeroDivisionError("by what"), "rank 1, step 3, phase [clip]: ZeroDivisionError: by what", 1),
    ],
)
def test_a_failure_says_who_where_and_why(
    error: Exception, text: str, code: int, store: Any, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    """The traceback of a fault of the program is printed with it, once, and stands in the log."""
    try:
        raise error
    except Exception as caught:
        failure = Alarm(1, store).ring_for(caught, "step 3, phase [clip]")
    assert failure == Failure(1, text, code)
    printed = capsys.readouterr().err
    assert printed.endswith(f"{text}\n") and printed.count("Traceback") == ("ZeroDivision" in text)
    assert [record.getMessage() + "\n" for record in caplog.records] == [printed]
    assert all(record.levelno == logging.ERROR and record.told for record in caplog.records)


def test_whoever_knows_more_is_first(
    store: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that learned of another's fault by agreement leaves it to that one, which has the traceback."""
    zero, one = both(store)

    def wait(*_: object) -> None:
        one.ring("with a traceback")
        zero.look()

    monkeypatch.setattr(Alarm, "_await", wait)
    zero.ring_for(Agreed("rank 1: ZeroDivisionError: by what", 1, rank=1), "")
    assert capsys.readouterr().err == "with a traceback\n"


def test_a_store_that_is_gone_keeps_nobody_from_telling(capsys: pytest.CaptureFixture[str]) -> None:
    """What goes wrong is told even if nobody knows whether another rank was first."""

    class Gone:
        def compare_set(self, *_words: str) -> None:
            raise RuntimeError("connection reset by peer")

    assert Alarm(0, Gone()).ring("no room").text == "no room"
    assert capsys.readouterr().err == "no room\n"


def _peer(store: Any, deed: Callable[["subprocess.Popen[bytes]"], object]) -> Alarm:
    """The alarm of rank 0 when its peer, rank 1, has ended in some way."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        zero = Alarm(0, store, {1: process.pid})
        zero.open()
        zero.look()
        assert zero.failure is None
        deed(process)
        process.wait()
        zero.look()
        zero.close()
    return zero


def test_a_peer_that_is_killed_is_named(store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """By its rank and its process, as soon as somebody looks."""
    failure = _peer(store, lambda process: process.kill()).failure
    assert failure is not None and failure.teller == 0
    assert failure.text.startswith("rank 1 (process ") and "is gone: it was killed" in failure.text
    assert capsys.readouterr().err.count("is gone") == 1


def test_a_peer_that_ends_as_it_should_is_no_failure(store: Any) -> None:
    """Ranks don't end at the same moment."""

    def end(process: "subprocess.Popen[bytes]") -> None:
        Alarm(1, store).leave()
        process.communicate(b"\n")

    assert _peer(store, end).failure is None


def test_closing_leaves_no_descriptor(store: Any) -> None:
    """Each peer takes one while the alarm is open."""
    before = len(os.listdir("/proc/self/fd"))
    zero = Alarm(0, store, {1: os.getpid()})
    zero.open()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    zero.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_torchrun_is_told_the_cause_and_who_was_first(store: Any, tmp_path: Path) -> None:
    """Each rank's error file says why all end; the times in them let torchrun find the rank that was the first."""
    paths = [tmp_path / "0.json", tmp_path / "1.json"]
    Alarm(1, store, error_file=str(paths[1])).ring("no room\nat all")
    Alarm(0, store, error_file=str(paths[0])).look()
    found = [json.loads(path.read_text())["message"] for path in paths]
    assert {each["extraInfo"]["py_callstack"] for each in found} == {"no room"}
    assert int(found[1]["extraInfo"]["timestamp"]) < int(found[0]["extraInfo"]["timestamp"])
