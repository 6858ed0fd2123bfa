"""The first failure of any rank ends every rank."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from drawloom.components.distributed import rank_monitor
from drawloom.components.distributed.launch_store import Failure
from drawloom.components.distributed.rank_errors import RankError
from drawloom.components.distributed.rank_monitor import RankMonitor
from drawloom.graph import UserError


@pytest.fixture
def store() -> Any:
    """Return a store shared by two ranks."""
    return HashStore()


def both(store: Any, **changes: Any) -> tuple[RankMonitor, RankMonitor]:
    """Return the monitors of rank 0 and rank 1."""
    return RankMonitor(0, 2, store, **changes), RankMonitor(1, 2, store, **changes)


def test_only_the_first_failure_is_printed(store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1's failure is printed once, and rank 0, failing a moment later, has the same one."""
    zero, one = both(store)
    failure = one.report_failure("rank 1 has no disk", 2)
    assert failure == Failure(1, "rank 1 has no disk", 2) == zero.report_failure("rank 0 lost rank 1")
    assert capsys.readouterr().err == "rank 1 has no disk\n"


def test_polling_reveals_the_failure_of_another_rank(store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints nothing, and is not killed before its grace period is over."""
    codes: list[int] = []
    zero, one = both(store, exit=codes.append)
    zero.poll_and_report_losses()
    zero.exit_if_grace_period_is_over()
    assert zero.failure is None
    one.report_failure("rank 1 has no disk", 2)
    capsys.readouterr()
    zero.poll_and_report_losses()
    zero.exit_if_grace_period_is_over()
    assert zero.failure == one.failure and codes == [] and capsys.readouterr().err == ""


def test_a_rank_that_does_not_end_in_time_is_killed(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the grace period a rank exits with the failure's exit code, but not once it is closed."""
    monkeypatch.setattr(rank_monitor, "GRACE", 0.05)
    codes: list[int] = []
    for monitor in both(store, exit=codes.append):
        monitor.report_failure("a failure", 3)
        time.sleep(0.06)
        monitor.exit_if_grace_period_is_over()
        assert codes.pop() == 3 and not codes
        monitor.close()
        monitor.exit_if_grace_period_is_over()
        assert codes == []


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (UserError("no room", 2), "rank 1, step 3, phase [clip]: no room", 2),
        (RankError("rank 0: no room", 1, 1), "step 3, phase [clip]: rank 0: no room", 1),
        (ZeroDivisionError("by what"), "rank 1, step 3, phase [clip]: ZeroDivisionError: by what", 1),
    ],
)
def test_the_message_of_an_exception_names_rank_and_location(
    error: Exception, text: str, code: int, store: Any, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    """A bug's traceback is printed once with the message, and logged; a UserError has none."""
    try:
        raise error
    except Exception as caught:
        failure = RankMonitor(1, 2, store, location="step 3, phase [clip]").report_exception(caught)
    assert failure == Failure(1, text, code)
    printed = capsys.readouterr().err
    assert printed.endswith(f"{text}\n") and printed.count("Traceback") == ("ZeroDivision" in text)
    assert [record.getMessage() + "\n" for record in caplog.records] == [printed]
    assert all(record.levelno == logging.ERROR and record.printed for record in caplog.records)


def test_the_rank_with_the_traceback_reports_first(
    store: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank with another rank's RankError waits for the other's own report."""
    zero, one = both(store)

    def wait(*_: object) -> None:
        one.report_failure("with a traceback")
        zero.poll_and_report_losses()

    monkeypatch.setattr(RankMonitor, "_wait_until_failure_is_known", wait)
    zero.report_exception(RankError("rank 1: ZeroDivisionError: by what", 1, rank=1))
    assert capsys.readouterr().err == "with a traceback\n"


def test_a_failure_is_printed_without_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank without a connection to the store prints its failure."""

    class Gone:
        def compare_set(self, *_words: str) -> None:
            raise RuntimeError("connection reset by peer")

    assert RankMonitor(0, 2, Gone()).report_failure("no room").text == "no room"
    assert capsys.readouterr().err == "no room\n"


def _after(store: Any, end: Callable[["subprocess.Popen[bytes]"], object]) -> RankMonitor:
    """Return the monitor of rank 0 after its peer, rank 1, has ended in this way."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        zero = RankMonitor(0, 2, store, {1: process.pid}, where=", on host 1, deep")
        zero.watch_local_peer_processes()
        zero.poll_and_report_losses()
        assert zero.failure is None
        end(process)
        process.wait()
        zero.poll_and_report_losses()
        zero.close()
    return zero


def test_a_killed_peer_is_reported(store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The next poll after its death reports a peer's rank, its process id, and the machine if there are several."""
    failure = _after(store, lambda process: process.kill()).failure
    assert failure is not None and failure.reporter == 0
    assert failure.text.startswith("rank 1 (process ") and ", on host 1, deep) is gone: it was killed" in failure.text
    assert capsys.readouterr().err.count("is gone") == 1


def test_an_announced_exit_is_not_reported_as_failure(store: Any) -> None:
    """Ranks do not end at the same moment in a normal end."""

    def end(process: "subprocess.Popen[bytes]") -> None:
        RankMonitor(1, 2, store).announce_exit()
        process.communicate(b"\n")

    assert _after(store, end).failure is None


def test_closing_leaves_no_descriptor(store: Any) -> None:
    """Each peer takes one descriptor while the monitor is open, and the thread's wake-up another one."""
    before = len(os.listdir("/proc/self/fd"))
    zero = RankMonitor(0, 2, store, {1: os.getpid()})
    zero.watch_local_peer_processes()
    assert len(os.listdir("/proc/self/fd")) == before + 2
    zero.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_error_files_name_the_cause_and_date_the_first_rank_earliest(store: Any, tmp_path: Path) -> None:
    """All error files have the cause; the first rank to fail has the earliest timestamp."""
    paths = [tmp_path / "0.json", tmp_path / "1.json"]
    RankMonitor(1, 2, store, error_file=str(paths[1])).report_failure("no room\nat all")
    RankMonitor(0, 2, store, error_file=str(paths[0])).poll_and_report_losses()
    messages = [json.loads(path.read_text())["message"] for path in paths]
    assert {message["extraInfo"]["py_callstack"] for message in messages} == {"no room"}
    assert int(messages[1]["extraInfo"]["timestamp"]) < int(messages[0]["extraInfo"]["timestamp"])


def test_a_lost_rank_is_published_and_ends_no_other_rank(store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One rank sees the death of a process, all call `on_loss` at each poll from then on, and no rank fails."""
    calls: list[int] = []
    zero = RankMonitor(0, 3, store, on_loss=lambda: calls.append(0))
    two = RankMonitor(2, 3, store, on_loss=lambda: calls.append(2))
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        zero.peers = {1: process.pid}
        zero.watch_local_peer_processes()
        process.wait()
    for monitor in (two, zero, two, zero, two):
        monitor.poll_and_report_losses()
    assert zero.losses.keys() == two.losses.keys() == {1} and calls == [0, 2, 0, 2]
    assert zero.failure is two.failure is None and capsys.readouterr().err == ""
    assert (
        zero.describe_ranks_to_blame().startswith(f"rank 1 (process {process.pid}) is gone")
        and "rank 1 is gone" in two.describe_ranks_to_blame()
    )
    zero.close()


def test_a_rank_without_heartbeats_is_lost(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is lost after the timeout, but not because the other one was suspended, and not if it has ended normally."""
    clock, calls = [100.0], list[int]()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    zero = RankMonitor(0, 3, store, on_loss=lambda: calls.append(0), heartbeat_timeout=5)
    one, two = (RankMonitor(rank, 3, store, on_loss=lambda: None, heartbeat_timeout=5) for rank in (1, 2))

    def pass_seconds(*seconds: float, beating: tuple[RankMonitor, ...]) -> None:
        for step in seconds:
            clock[0] += step
            for monitor in beating:
                monitor.poll_and_report_losses()

    pass_seconds(*[1] * 10, beating=(zero, one, two))
    two.announce_exit()
    pass_seconds(1, 600, 1, beating=(zero, one))
    assert not zero.losses
    pass_seconds(1, 1, 1, 1, beating=(zero,))
    assert not zero.losses and not calls
    pass_seconds(1, 1, 1, beating=(zero,))
    assert zero.losses == {1: "has sent no heartbeat for 5 s"} and calls


def test_a_stopped_process_is_lost_and_killed(store: Any) -> None:
    """The monitor's thread notices the stop long before heartbeats are missed, and then the end."""
    broken = threading.Event()
    zero = RankMonitor(0, 2, store, on_loss=broken.set)
    with subprocess.Popen(["sleep", "60"]) as process:
        zero.peers = {1: process.pid}
        zero.start()
        os.kill(process.pid, signal.SIGSTOP)
        assert broken.wait(10) and zero.losses == {1: "is stopped (SIGSTOP)"}
        assert process.wait(10) == -signal.SIGKILL
    zero.close()


def test_a_lost_rank_ends_when_it_wakes_up(store: Any) -> None:
    """A rank declared lost by others exits at its next poll, and can't come back with stale state."""
    codes: list[int] = []
    zero, one = both(store, on_loss=lambda: None, exit=codes.append)
    zero.declare_lost({1: "hangs"})
    zero.poll_and_report_losses()
    assert zero.is_broken and codes == []
    one.poll_and_report_losses()
    assert codes == [1]


def test_the_rank_for_which_all_others_wait_is_declared_lost(store: Any) -> None:
    """Nobody is, if no rank waits, or if all do."""
    monitors = [RankMonitor(rank, 3, store, on_loss=lambda: None, location=f"step {rank}") for rank in range(3)]
    for monitor in monitors[1:]:
        monitor.start()
    zero, one, two = monitors
    assert zero.declare_awaited_ranks_lost() == frozenset()
    with zero.mark_blocked("an all-reduce", "world"):
        one.is_recovering = two.is_recovering = True
        time.sleep(2 * rank_monitor.TICK)
        assert zero.declare_awaited_ranks_lost() == frozenset()
        two.is_recovering, two.exit = False, lambda _: None
        time.sleep(2 * rank_monitor.TICK)
        assert zero.declare_awaited_ranks_lost() == {2}
    zero.poll_and_report_losses()
    assert zero.describe_lost_ranks() == "rank 2 hangs in step 2"
    for monitor in monitors:
        monitor.close()


def test_a_loss_published_by_another_rank_counts_before_the_next_poll(store: Any) -> None:
    """A rank without a notice of a loss returns once its own monitor has read the loss, so that a message has it."""
    zero, two = (RankMonitor(rank, 3, store, on_loss=lambda: None) for rank in (0, 2))
    assert not zero.find_published_loss()
    two.declare_lost({1: "is gone"})
    assert not zero.is_broken
    zero.start()
    try:
        assert zero.find_published_loss() and zero.describe_lost_ranks() == "rank 1 is gone"
    finally:
        zero.close()
    assert not RankMonitor().find_published_loss()
