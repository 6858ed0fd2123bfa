"""Who is still there."""

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.hang_diagnosis import RankStatus, diagnosis
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.graph import UserError
from support.processes import RanksFailed, run_ranks

WAITS = "waits for a reduction in group world"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({0: RankStatus("step 3", WAITS)}, "ranks 1, 2 do not answer"),
        ({0: RankStatus("step 3", WAITS), 2: RankStatus("step 3")}, "rank 1 does not answer"),
        (
            {0: RankStatus("step 3", WAITS), 1: RankStatus("step 2, phase [data]"), 2: RankStatus("step 3", WAITS)},
            "rank 1 (step 2, phase [data]) waits for nobody",
        ),
        (
            {
                0: RankStatus("step 3", WAITS),
                1: RankStatus("", "waits for a message in group ring"),
                2: RankStatus("", WAITS),
            },
            f"rank 0 (step 3) {WAITS}; rank 1 waits for a message in group ring; rank 2 {WAITS}",
        ),
        (
            {0: RankStatus("a", WAITS), 1: RankStatus("b", "", WAITS), 2: RankStatus("c")},
            "rank 2 (c) waits for nobody",
        ),
        (
            {0: RankStatus("a", WAITS), 1: RankStatus("b", "", WAITS), 2: RankStatus("c", WAITS)},
            "rank 1 (b) waits for nobody",
        ),
        (
            {0: RankStatus("a"), 1: RankStatus("b"), 2: RankStatus("c")},
            "rank 0 (a) waits for nobody; rank 1 (b) waits for nobody; ",
        ),
    ],
)
def test_whoever_does_not_answer_is_accused_first(answers: dict[int, RankStatus], words: str) -> None:
    """Then whoever waits for nobody; and if all wait for one another, each is told with what it waits for."""
    assert diagnosis(answers, 3).startswith(words)


def _work(limit: float, deed: str, guilty: int) -> tuple[str, float]:
    """Sum with the others again and again until one does something else; what the rest are told, and when."""
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=20.0)
    processes.open()
    everybody = processes.group("world", [[*range(processes.world_size)]])
    processes.set_timeout(limit)
    processes.set_location("step 1, phase [sum]")
    everybody.sum(torch.zeros(1))
    processes.set_location("step 2, phase [other]")
    if processes.rank == guilty:
        DEEDS[deed]()
    began = time.monotonic()
    try:
        everybody.sum(torch.zeros(1))
    except UserError as error:
        return str(error), time.monotonic() - began
    finally:
        processes.close()
    return "", 0.0


def _write(slow: int) -> str:
    """A thread exchanges something with the other rank, and one is slow to; whom each accuses that waits for it."""
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=20.0)
    processes.open()
    everybody = processes.group("world", [[*range(processes.world_size)]])
    apart = processes.control_group("writing")
    everybody.sum(torch.zeros(1))
    deed = (lambda: time.sleep(1.7)) if processes.rank == slow else (lambda: apart.gather_json(None))
    threading.Thread(target=deed, daemon=True).start()
    time.sleep(0.5)
    told = processes.diagnose()
    time.sleep(1.3)
    if processes.rank == slow:
        apart.gather_json(None)
    everybody.sum(torch.zeros(1))
    processes.close()
    return told


def test_whoever_s_thread_waits_for_others_accuses_them() -> None:
    """Where both main threads wait for their own, it is the rank whose own waits for nobody; that one accuses none."""
    assert run_ranks(_write, 2, 1) == ["rank 1 waits for nobody", ""]


def _fail() -> None:
    time.sleep(0.3)
    raise ValueError("a fault of its own")


DEEDS: dict[str, Callable[[], None]] = {
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sleep": lambda: time.sleep(60),
    "fail": _fail,
}


@pytest.mark.parametrize(
    ("deed", "guilty", "seconds", "words"),
    [
        ("stop", 1, 4.0, "rank 1 does not answer"),
        ("stop", 0, 4.0, "rank 0 does not answer"),
        ("die", 2, 2.0, "rank 2 "),  # does not answer, or is gone
        ("sleep", 1, 4.0, "rank 1 (step 2, phase [other]) waits for nobody"),
    ],
)
def test_the_guilty_rank_is_named_by_all_others(deed: str, guilty: int, seconds: float, words: str) -> None:
    """Whether it was killed, stands still, or does something else; in time."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_work, 3, 1.0, deed, guilty, timeout=30, lost={guilty})
    told = caught.value.values
    assert told.keys() >= {0, 1, 2} - {guilty}
    for rank in {0, 1, 2} - {guilty}:
        assert f"in group world (ranks 0, 1, 2) failed on rank {rank}: {words}" in told[rank][0]
        assert "; see its log" in told[rank][0]
        assert told[rank][1] < seconds


def test_a_rank_that_fails_by_itself_tells_its_own_cause() -> None:
    """The others are told that it is gone; it tells why."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_work, 2, 5.0, "fail", 1, timeout=8)
    assert "a fault of its own" in caught.value.failures[1]
    assert "failed on rank 0: rank 1" in caught.value.values[0][0]
