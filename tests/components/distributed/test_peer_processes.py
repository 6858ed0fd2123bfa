"""Ends and stops of other processes on this machine."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from drawloom.components.distributed.peer_processes import STOPPED_LOOKS, PeerProcesses, is_process_stopped_by_signal


@pytest.fixture
def process() -> "Iterator[subprocess.Popen[bytes]]":
    """Yield a sleeping process, and kill it afterwards."""
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        yield sleeping
        sleeping.kill()


@pytest.fixture
def peers(process: "subprocess.Popen[bytes]") -> Iterator[PeerProcesses]:
    """Yield an open watcher of the process, as rank 1."""
    peers = PeerProcesses({1: process.pid})
    peers.open()
    yield peers
    peers.close()


def _measure_wait(peers: PeerProcesses, seconds: float) -> float:
    start = time.monotonic()
    peers.wait_for_change(seconds, looks_for_stops=False)
    return time.monotonic() - start


def test_an_end_is_noticed_once_and_at_once(process: "subprocess.Popen[bytes]", peers: PeerProcesses) -> None:
    """The wait ends with the process; a later wait does not end because of it."""
    killer = threading.Timer(0.1, process.kill)
    killer.start()
    assert 0.05 < _measure_wait(peers, 20) < 10 and peers.find_ended() == {1}
    killer.join()
    assert _measure_wait(peers, 0.1) >= 0.1 and peers.find_ended() == {1}
    assert peers.find_stopped() == []


def test_killed_processes_are_awaited(process: "subprocess.Popen[bytes]", peers: PeerProcesses) -> None:
    """The wait for a process ends with it, or after its limit; ranks on other machines are not awaited."""
    begin = time.monotonic()
    peers.wait_until_ended([1, 7], 0.1)
    assert time.monotonic() - begin >= 0.1
    killer = threading.Timer(0.1, process.kill)
    killer.start()
    peers.wait_until_ended([1, 7], 20)
    assert peers.find_ended() == {1} and 0.15 < time.monotonic() - begin < 10
    killer.join()
    peers.wait_until_ended([1, 7], 20)


def test_a_wait_is_woken_for_good(peers: PeerProcesses) -> None:
    """A closing monitor does not wait for its thread's next look."""
    waker = threading.Timer(0.1, peers.end_all_waits)
    waker.start()
    assert _measure_wait(peers, 20) < 10 and _measure_wait(peers, 20) < 10
    waker.join()
    assert peers.find_ended() == set()


def test_a_process_is_stopped_after_several_looks_in_a_row(
    process: "subprocess.Popen[bytes]", peers: PeerProcesses
) -> None:
    """A process that is resumed in between is not, and a single look does not wait."""
    for _ in range(2):
        _signal_and_wait(process.pid, signal.SIGSTOP, stops=True)
        assert not any(peers.look_for_stops() for _ in range(STOPPED_LOOKS - 1))
        _signal_and_wait(process.pid, signal.SIGCONT, stops=False)
        assert not peers.look_for_stops() and peers.find_stopped() == []
    _signal_and_wait(process.pid, signal.SIGSTOP, stops=True)
    peers.wait_for_change(20, looks_for_stops=True)
    assert peers.find_stopped() == [1] and peers.find_ended() == set()
    peers.kill([1])
    assert process.wait(10) == -signal.SIGKILL


def _signal_and_wait(process: int, number: signal.Signals, *, stops: bool) -> None:
    """Send a signal, and wait until the process is stopped, or is not."""
    os.kill(process, number)
    while is_process_stopped_by_signal(process) != stops:
        time.sleep(0.01)
