"""Signals that ask the run to end."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
from torch import Tensor

from drawloom.components.run.signals import Signals
from support.processes import RanksFailed, run_ranks


@attrs.define
class World:
    """Two ranks, of which the other was sent a signal."""

    rank: int
    others: int
    dtypes: list[Any] = attrs.field(factory=list)

    def max(self, tensor: Tensor) -> None:
        self.dtypes.append(str(tensor.dtype))
        tensor.clamp_(min=self.others)


@attrs.frozen
class Alone:
    """The mesh of one rank, in a process of its own."""

    world: World = attrs.field(factory=lambda: World(rank=0, others=0))


@pytest.fixture
def signals(one_rank: Any) -> Iterator[Signals]:
    """Open, on one rank."""
    signals = Signals(mesh=one_rank)
    signals.open()
    yield signals
    signals.close()


def _send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0)  # lets the interpreter see it


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_only_noted(signals: Signals, number: int, capfd: pytest.CaptureFixture[str]) -> None:
    """The run learns its number, and whoever sent it what happens now."""
    assert signals.agreed() == 0
    _send(number)
    assert signals.agreed() == number
    assert capfd.readouterr().err == "\nstopping after this step; a second signal ends at once\n"


def test_a_second_signal_does_what_it_did_before(signals: Signals) -> None:
    """After SIGTERM was noted, SIGINT interrupts, and both handlers are those from before."""
    _send(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        _send(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _be_terminated_twice() -> None:
    mesh: Any = Alone()
    signals = Signals(mesh=mesh)
    signals.open()
    _send(signal.SIGTERM)
    _send(signal.SIGTERM)


def test_a_second_sigterm_ends_the_process() -> None:
    """By that signal, and at once."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_be_terminated_twice, 1, variables=False)
    assert str(caught.value) == f"rank 0: died with exit code {-signal.SIGTERM}"


def test_closing_restores_the_handlers(one_rank: Any) -> None:
    """Whoever took a signal before has it again."""

    def mine(_number: int, _frame: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        signals = Signals(mesh=one_rank)
        signals.open()
        assert signal.getsignal(signal.SIGTERM) is not mine
        signals.close()
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_no_signal_is_taken(one_rank: Any) -> None:
    """Opening there is no error, and handlers are left alone."""
    signals = Signals(mesh=one_rank)
    thread = threading.Thread(target=signals.open)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signals.agreed() == 0
    signals.close()


@pytest.mark.parametrize(("own", "others", "agreed"), [(0, 0, 0), (0, 15, 15), (2, 15, 15), (15, 2, 15), (2, 0, 2)])
def test_ranks_agree_on_the_largest(
    mesh_of: Callable[..., Any], capfd: pytest.CaptureFixture[str], own: int, others: int, agreed: int
) -> None:
    """Each call is one reduction of a whole number; only the main rank speaks of it."""
    world = World(rank=1, others=others)
    signals = Signals(mesh=mesh_of(world=world))
    signals.open()
    if own:
        _send(own)
    assert signals.agreed() == agreed
    signals.close()
    assert world.dtypes == ["torch.int64"]
    assert capfd.readouterr().err == ""
