"""Hang diagnosis."""

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.distributed.rank_monitor import RankStatus, format_hang_diagnosis
from drawloom.graph import UserError
from support.processes import RanksFailedError, run_ranks

WAITS = "waits for an all-reduce in group world"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({0: RankStatus("step 3", WAITS)}, "ranks 1, 2 do not answer"),
        ({0: RankStatus("step 3", WAITS), 2: RankStatus("step 3")}, "rank 1 does not answer"),
        (
            {0: RankStatus("step 3", WAITS), 1: RankStatus("step 2, phase [data]"), 2: RankStatus("step 3", WAITS)},
            "rank 1 (step 2, phase [data]) is not in a collective",
        ),
        (
            {
                0: RankStatus("step 3", WAITS),
                1: RankStatus("", "waits for a point-to-point transfer in group ring"),
                2: RankStatus("", WAITS),
            },
            f"rank 0 (step 3) {WAITS}; rank 1 waits for a point-to-point transfer in group ring; rank 2 {WAITS}",
        ),
        (
            {0: RankStatus("a", WAITS), 1: RankStatus("b", "", WAITS), 2: RankStatus("c")},
            "rank 2 (c) is not in a collective",
        ),
        (
            {0: RankStatus("a", WAITS), 1: RankStatus("b", "", WAITS), 2: RankStatus("c", WAITS)},
            "rank 1 (b) is not in a collective",
        ),
        (
            {0: RankStatus("a"), 1: RankStatus("b"), 2: RankStatus("c")},
            "rank 0 (a) is not in a collective; rank 1 (b) is not in a collective; ",
        ),
    ],
)
def test_silent_ranks_are_named_before_ranks_in_no_collective(answers: dict[int, RankStatus], words: str) -> None:
    """If all answer, ranks in no collective are named; if all are in one, their collectives are."""
    assert format_hang_diagnosis(answers, 3).startswith(words)


def _work(limit: float, fault: str, faulty: int) -> tuple[str, float]:
    """All-reduce twice, one rank misbehaving in between; the error of this rank, and after how many seconds."""
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=20.0)
    processes.open()
    world = processes.make_group("world", [[*range(processes.world_size)]])
    processes.record_step_and_phase("step 1, phase [sum]")
    world.sum(torch.zeros(1))  # with the long timeout: on a busy machine ranks start seconds apart
    processes.set_timeout(limit)
    processes.record_step_and_phase("step 2, phase [other]")
    if processes.rank == faulty:
        FAULTS[fault]()
    began = time.monotonic()
    try:
        world.sum(torch.zeros(1))
    except UserError as error:
        return str(error), time.monotonic() - began
    finally:
        processes.close()
    return "", 0.0


def _write(slow: int) -> str:
    """Gather in a background thread on both ranks, one of them late; return this rank's diagnosis."""
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=20.0)
    processes.open()
    world = processes.make_group("world", [[*range(processes.world_size)]])
    control = processes.make_control_group("writing")
    world.sum(torch.zeros(1))
    work = (lambda: time.sleep(1.7)) if processes.rank == slow else (lambda: control.gather_json(None))
    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.5)
    diagnosis = processes.diagnose_hang()
    time.sleep(1.3)
    if processes.rank == slow:
        control.gather_json(None)
    world.sum(torch.zeros(1))
    processes.close()
    return diagnosis


def test_a_blocked_background_thread_counts_as_blocked() -> None:
    """The rank whose thread is in no collective is named by the other rank, and itself names none."""
    assert run_ranks(_write, 2, 1) == ["rank 1 is not in a collective", ""]


def _fail() -> None:
    time.sleep(0.3)
    raise ValueError("a fault of its own")


FAULTS: dict[str, Callable[[], None]] = {
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sleep": lambda: time.sleep(60),
    "fail": _fail,
}


@pytest.mark.parametrize(
    ("fault", "faulty", "seconds", "words"),
    [
        ("stop", 1, 4.0, "rank 1 does not answer"),
        ("stop", 0, 4.0, "rank 0 does not answer"),
        ("die", 2, 2.0, "rank 2 "),  # does not answer, or is gone
        ("sleep", 1, 4.0, "rank 1 (step 2, phase [other]) is not in a collective"),
    ],
)
def test_the_hanging_rank_is_named_by_all_others(fault: str, faulty: int, seconds: float, words: str) -> None:
    """If a rank is killed, stopped or busy elsewhere, every other rank names it in time."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_work, 3, 1.0, fault, faulty, timeout=30, lost={faulty})
    errors = caught.value.values
    assert errors.keys() >= {0, 1, 2} - {faulty}, str(caught.value)
    for rank in {0, 1, 2} - {faulty}:
        assert f"in group world (ranks 0, 1, 2) failed on rank {rank}: {words}" in errors[rank][0]
        assert "; see its log" in errors[rank][0]
        assert errors[rank][1] < seconds


def test_a_rank_that_raises_reports_its_own_error() -> None:
    """The other rank names it; its own error is the exception."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_work, 2, 5.0, "fail", 1, timeout=8)
    assert "a fault of its own" in caught.value.failures[1]
    assert "failed on rank 0: rank 1" in caught.value.values[0][0]
