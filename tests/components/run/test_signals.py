"""Signals for stopping the run."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from drawloom.components.ports.run import StoppedError
from drawloom.components.run.signals import Signals
from support.doubles import Exit
from support.processes import RanksFailedError, run_ranks

ECHO_HERE = 0.3


@attrs.define
class World:
    """Two ranks, the other with a received signal."""

    rank: int
    others: int
    device: torch.device = torch.device("cpu")
    dtypes: list[Any] = attrs.field(factory=list)

    def max(self, tensor: Tensor) -> None:
        self.dtypes.append(str(tensor.dtype))
        tensor.clamp_(min=self.others)


@attrs.frozen
class Alone:
    """A mesh of one rank, in a separate process."""

    world: World = attrs.field(factory=lambda: World(rank=0, others=0))


@pytest.fixture
def signals(one_rank: Any) -> Iterator[Signals]:
    """Yield an open node on one rank whose exit is recorded."""
    signals = Signals(mesh=one_rank, extra_signals=["SIGUSR1"])
    signals.exit, signals.debounce = Exit(), ECHO_HERE
    signals.open()
    yield signals
    signals.close()


def _send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0)  # lets the interpreter see it


def _send_until_exit(signals: Signals, number: int) -> None:
    """Repeat a signal: the reader may see the first one late, and ignores signals in quick succession."""
    for _ in range(300):
        _send(number)
        if signals.exit.called.wait(0.1):  # type: ignore[attr-defined]
            return
    raise AssertionError("no repeated signal exited")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_stops_after_the_step(
    signals: Signals, number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The number is kept for the trainer, and a notice is printed."""
    assert signals.agree_on_signal() == 0
    _send(number)
    assert signals.agree_on_signal() == number
    assert not signals.exit.called.wait(0.2)  # type: ignore[attr-defined]
    assert capfd.readouterr().err == "\nstopping after this step; Ctrl-C ends at once\n"


@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)],
)
def test_a_second_signal_exits_at_once_if_one_is_ctrl_c(signals: Signals, first: int, second: int) -> None:
    """The exit code is the second signal's, whichever was the first."""
    _send(first)
    _send_until_exit(signals, second)
    assert set(signals.exit.codes) == {128 + second}  # type: ignore[attr-defined]


def test_a_forwarded_interrupt_counts_once(signals: Signals) -> None:
    """A terminal sends Ctrl-C to every process, and a launcher forwards it; only a later one exits."""
    handlers: Any = signals._handlers
    handlers.debounce = 60.0  # however late a busy machine sends the second one
    _send(signal.SIGINT)
    _send(signal.SIGINT)
    assert not signals.exit.called.wait(ECHO_HERE)  # type: ignore[attr-defined]
    handlers.debounce = ECHO_HERE
    _send_until_exit(signals, signal.SIGINT)


@pytest.mark.parametrize("later", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_of_a_cluster_count_once_however_late_they_repeat(signals: Signals, later: int) -> None:
    """A warning before SIGTERM, and a SIGTERM forwarded seconds later, cost no checkpoint."""
    handlers: Any = signals._handlers
    handlers.debounce = 0.0
    for number in (signal.SIGTERM, later, later):
        _send(number)
    assert not signals.exit.called.wait(0.2)  # type: ignore[attr-defined]
    assert signals.agree_on_signal() == signal.SIGTERM


def test_after_training_a_signal_raises_at_once(signals: Signals, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing has to be saved: the main thread ends in order, and no step is announced; a later signal exits."""
    with pytest.raises(StoppedError) as stopped, signals.raise_stopped_error_on_signal():
        _send(signal.SIGTERM)
    assert stopped.value.signal == signal.SIGTERM
    _send_until_exit(signals, signal.SIGINT)
    assert capfd.readouterr().err == ""


def test_a_signal_of_the_last_step_raises_after_training(signals: Signals) -> None:
    """A signal too late for the last step's agreement is not lost."""
    _send(signal.SIGINT)
    with pytest.raises(StoppedError) as stopped, signals.raise_stopped_error_on_signal():
        raise AssertionError("a final task has begun")
    assert stopped.value.signal == signal.SIGINT


def test_another_ranks_signal_of_the_last_step_raises_after_training(mesh_of: Callable[..., Any]) -> None:
    """A rank without a signal ends before the final tasks, too, whose collectives need the other rank."""
    signals = Signals(mesh=mesh_of(world=World(rank=1, others=signal.SIGTERM)))
    signals.open()
    with pytest.raises(StoppedError) as stopped, signals.raise_stopped_error_on_signal():
        raise AssertionError("a final task has begun")
    assert stopped.value.signal == signal.SIGTERM
    signals.close()


def test_a_signal_after_the_final_tasks_raises_nothing(signals: Signals) -> None:
    """Only closing the nodes remains; the run's caller gets no exception for a signal."""
    with signals.raise_stopped_error_on_signal():
        pass
    _send(signal.SIGINT)
    assert signals.agree_on_signal() == signal.SIGINT


def test_other_handled_signals_are_not_counted(signals: Signals) -> None:
    """A signal with another's handler is ignored, though the interpreter writes its number too."""
    received: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _frame: received.append(number))
    try:
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR2):
            _send(number)
        assert not signals.exit.called.wait(0.2)  # type: ignore[attr-defined]
        assert signals.agree_on_signal() == signal.SIGTERM and received == [signal.SIGUSR2] * 2
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_run_that_does_not_end_in_time_exits(one_rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    """After the grace period it exits with the signal's code and a log line, and not earlier."""
    signals = Signals(mesh=one_rank, grace=0.3)
    signals.exit = Exit()
    signals.open()
    began = time.monotonic()
    _send(signal.SIGTERM)
    assert signals.exit.called.wait(30) and signals.exit.codes == [143]
    assert time.monotonic() - began >= 0.3
    signals.close()
    assert caplog.messages == [
        "the run did not end within 0.3 s after signal 15, so it is killed; committed checkpoints are intact"
    ]


def test_closing_cancels_the_deadline(one_rank: Any) -> None:
    """A run that ends in time is not killed later."""
    signals = Signals(mesh=one_rank, grace=0.2)
    signals.exit = Exit()
    signals.open()
    _send(signal.SIGTERM)
    signals.close()
    assert not signals.exit.called.wait(0.5)
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_while_a_graph_is_opened_again_stops_its_successor(one_rank: Any) -> None:
    """Its grace period counts from the signal, and closing the successor restores the handlers."""
    before = signal.getsignal(signal.SIGTERM)
    first, successor = Signals(mesh=one_rank, grace=0.3), Signals(mesh=one_rank, grace=0.3)
    first.exit = called = Exit()
    first.open()
    handlers = first.hand_over()
    first.close()
    _send(signal.SIGTERM)
    successor.take_over(handlers)
    successor.open()
    assert successor.agree_on_signal() == signal.SIGTERM
    assert called.called.wait(30) and called.codes == [143]
    successor.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_agreed_signal_is_kept_if_the_rank_that_received_it_is_lost(mesh_of: Callable[..., Any]) -> None:
    """It may be lost while the ranks save."""
    worlds = World(rank=1, others=signal.SIGTERM), World(rank=0, others=0)
    first, successor = (Signals(mesh=mesh_of(world=world)) for world in worlds)
    first.open()
    assert first.agree_on_signal() == signal.SIGTERM
    successor.take_over(first.hand_over())
    first.close()
    successor.open()
    assert successor.agree_on_signal() == signal.SIGTERM
    successor.close()


def _hang(grace: float, signals_sent: int) -> None:
    """Block in a C library, out of reach of Python's handlers, and receive signals."""
    mesh: Any = Alone()
    signals = Signals(mesh=mesh, grace=grace)
    signals.debounce = ECHO_HERE
    signals.open()

    def send() -> None:
        for number in [signal.SIGTERM, *[signal.SIGINT] * (signals_sent - 1)]:
            time.sleep(2 * ECHO_HERE)
            _send(number)

    threading.Thread(target=send, daemon=True).start()
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


@pytest.mark.parametrize(("grace", "signals_sent"), [(0.3, 1), (60.0, 60)])
def test_a_hanging_process_exits_too(grace: float, signals_sent: int) -> None:
    """After the grace period or at Ctrl-C, which may follow the first too closely, though it is blocked."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_hang, 1, grace, signals_sent, variables=False, timeout=20)
    assert str(caught.value) == f"rank 0: died with exit code {143 if signals_sent == 1 else 130}"


def test_closing_restores_the_handlers(one_rank: Any) -> None:
    """Earlier handlers are installed again."""

    def mine(_number: int, _frame: Any) -> None: ...

    before, interrupted = signal.signal(signal.SIGTERM, mine), signal.getsignal(signal.SIGINT)
    try:
        signals = Signals(mesh=one_rank)
        signals.open()
        assert signal.getsignal(signal.SIGTERM) is not mine
        signals.close()
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is interrupted
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_no_handler_is_installed(one_rank: Any) -> None:
    """Opening in another thread is no error, and changes no handler."""
    signals, before = Signals(mesh=one_rank), signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=signals.open)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    assert signals.agree_on_signal() == 0
    signals.close()


@pytest.mark.parametrize(("own", "others", "agreed"), [(0, 0, 0), (0, 15, 15), (2, 15, 15), (15, 2, 15), (2, 0, 2)])
def test_ranks_agree_on_the_largest_signal(
    mesh_of: Callable[..., Any], capfd: pytest.CaptureFixture[str], own: int, others: int, agreed: int
) -> None:
    """A call is one all-reduce over an integer; only rank 0 prints."""
    world = World(rank=1, others=others)
    signals = Signals(mesh=mesh_of(world=world))
    signals.open()
    if own:
        _send(own)
    assert signals.agree_on_signal() == agreed
    signals.close()
    assert world.dtypes == ["torch.int64"]
    assert capfd.readouterr().err == ""
