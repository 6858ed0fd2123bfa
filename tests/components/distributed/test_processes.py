"""Joining and leaving the process group."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from drawloom.components.distributed import launched_ranks, torchrun
from drawloom.components.distributed.connections import Connections
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.generation import Generation, RunProcess
from drawloom.components.distributed.group_factory import GroupFactory
from drawloom.components.distributed.launched_ranks import LaunchedRanks
from drawloom.components.distributed.membership import CURRENT, Membership, Spares
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.distributed.rank_monitor import RankMonitor
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.distributed.torchrun import Launch
from drawloom.graph import Every, UserError
from drawloom.graph.problems import ReopenError, ReportedError
from support.processes import run_ranks


def _processes(timeout: float = 20.0) -> TorchProcesses:
    return TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=timeout)


def _numbers() -> tuple[int, int, bool]:
    processes = _processes()
    before = processes.world_size, dist.is_initialized()
    processes.open()
    numbers = processes.rank, processes.world_size
    processes.close()
    return (*numbers, before == (1, False) and not dist.is_initialized())


def _halves() -> tuple[list[int], list[int], int]:
    processes = _processes()
    processes.open()
    pair = processes.make_group("pair", [[0, 1], [2, 3]])
    across = processes.make_group("across", [[0, 2], [1, 3]])
    gathered = pair.gather_json(processes.rank), across.gather_json(processes.rank)
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    processes.close()
    return (*gathered, names.count("pt_gloo_runloop"))


def _open_twice() -> str:
    processes = _processes()
    processes.open()
    try:
        _processes().open()
    except UserError as error:
        return str(error)
    finally:
        processes.close()
    return "two groups"


def _wait_in_vain() -> tuple[str, float]:
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "2"
    start = time.monotonic()
    try:
        _processes(timeout=1).open()
    except UserError as error:
        return str(error), time.monotonic() - start
    return "joined", 0


def test_open_joins_and_close_destroys_the_process_group() -> None:
    """The ranks are torchrun's while open, and torch has no default group after close."""
    assert run_ranks(_numbers, 2) == [(0, 2, True), (1, 2, True)]


def test_a_process_gets_its_own_groups() -> None:
    """A process gets its own group among several sets, in the set's order; a group has one thread, as the world."""
    expected = [([0, 1], [0, 2], 3), ([0, 1], [1, 3], 3), ([2, 3], [0, 2], 3), ([2, 3], [1, 3], 3)]
    assert run_ranks(_halves, 4) == expected


def _open_three_times(port: int) -> list[tuple[list[int], int]]:
    if port:  # rank 0 hosts the store, as without torchrun
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        os.environ["MASTER_PORT"] = str(port)
    return [_gather_in_a_run() for _ in range(3)]


def _gather_in_a_run() -> tuple[list[int], int]:
    processes = _processes()
    processes.open()
    cycle: list[Any] = [processes.make_group("pair", [[0, 1]]), processes.open_channel("link", 0, 1)]
    cycle.append(cycle)  # FSDP makes such cycles
    names = cycle[0].gather_json(processes.rank)
    threads = len(os.listdir("/proc/self/task"))
    processes.close()
    return names, threads


@pytest.mark.parametrize("port", [0, 1], ids=["a launcher's store", "the store of rank 0"])
def test_processes_open_several_runs(port: int) -> None:
    """The ranks of a later run meet one another, not addresses of the first, and its threads have ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port *= free.getsockname()[1]
    for first, *later in run_ranks(_open_three_times, 2, port):
        assert all(names == [0, 1] for names, _ in [first, *later])
        assert all(threads <= first[1] + 2 for _, threads in later)  # of the first run's store


def test_one_process_needs_no_group() -> None:
    """Without torchrun's variables no process group is made, and every group is a group of one."""
    assert run_ranks(_numbers, 1, variables=False) == [(0, 1, True)]
    processes = _processes()
    processes.open()
    assert isinstance(processes.make_group("world", [[0]]), SingleProcess)
    assert not dist.is_initialized()
    processes.close()


def test_a_foreign_process_group_is_refused() -> None:
    """An existing default process group is neither used nor destroyed."""
    for text in run_ranks(_open_twice, 2):
        assert "torch has a default process group already" in text


def test_missing_processes_are_an_error_after_the_timeout() -> None:
    """If the others do not join, the message has their number and the seconds waited."""
    [(text, seconds)] = run_ranks(_wait_in_vain, 1)
    assert "rank 0 did not reach all 2 ranks within 1 s" in text
    assert seconds < 10


def test_a_timeout_of_zero_is_refused() -> None:
    """A timeout of zero seconds is an invalid setting."""
    with pytest.raises(ValueError, match="0 is not above 0"):
        _processes(timeout=0)


def test_close_without_open_does_nothing() -> None:
    """A node can be closed without having been opened, as after an earlier node's failure."""
    _processes().close()
    assert torch.distributed.is_available()


def _slow_partner(limit: float) -> str:
    processes = _processes()
    processes.open()
    pair = processes.make_group("pair", [[0, 1]])
    processes.set_timeout(limit)
    if processes.rank == 1:
        time.sleep(2.5)
        processes.close()
        return "late"
    began = time.monotonic()
    with pytest.raises(UserError):
        pair.sum(torch.zeros(1))
    return "gave up" if time.monotonic() - began < 2 else "waited"


def test_a_changed_timeout_holds_for_groups_that_exist() -> None:
    """After set_timeout a collective of an existing group gives up after the new time."""
    assert run_ranks(_slow_partner, 2, 0.5) == ["gave up", "late"]


def test_a_changed_timeout_holds_for_groups_that_are_made_later() -> None:
    """With survival, a rank waits for the others of a new group as long as set_timeout allows."""
    device = ComputeDevice(kind="cpu", backend="gloo")
    groups = GroupFactory(device, 0, 3, timeout=3.0, survives_rank_losses=True, store=HashStore())
    groups.set_timeout(0.1)
    with pytest.raises(RuntimeError, match=r"not all ranks came to make group pair within 0\.1 s"):
        groups.make_group("pair", [[0, 1], [2]])


@pytest.mark.parametrize(
    ("launch", "backend", "on_failure", "words"),
    [
        (Launch(world_size=2), "nccl", "continue", "'continue' needs a GPU for each process.*start fewer"),
        (Launch(world_size=2, spares=1), "gloo", "stop", r"1 spare.*--spares.*write on_failure = 'continue'"),
    ],
)
def test_settings_that_survive_no_loss_are_refused(
    launch: Launch, backend: Any, on_failure: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the setting and the reason, and no process group is made."""
    monkeypatch.setattr(torchrun, "read_launch", lambda: launch)
    monkeypatch.setattr(ComputeDevice, "shares_gpu", not launch.spares)
    processes = TorchProcesses(device=ComputeDevice(kind="cpu", backend=backend), on_failure=on_failure)
    with pytest.raises(UserError, match=words):
        processes.open()
    assert not dist.is_initialized()


def _surviving_ranks(*members: RunProcess) -> LaunchedRanks:
    device, store = ComputeDevice(kind="cpu"), HashStore()
    ranks = LaunchedRanks(Launch(), device, Every(), timeout=20.0, heartbeat_timeout=15.0)
    ranks.generation, ranks._spares, ranks._control = Generation("run", 0, members), Spares(store), store
    return ranks


def test_a_lost_store_is_named_when_processes_want_to_join(capsys: pytest.CaptureFixture[str]) -> None:
    """The message says why the run ends, not only that processes were to join."""
    ranks = _surviving_ranks(RunProcess.of_this_process(), RunProcess("elsewhere", 1))
    ranks.monitor = RankMonitor(0, 2, store=HashStore(), is_lost=True)
    error = ranks.report_failure(ReopenError("processes join the run after step 3"))
    assert isinstance(error, ReportedError) and error.exit_code == 1
    text = (
        "processes join the run after step 3, and can't: the rendezvous store, which is in rank 0 or in torchrun, does"
    )
    assert text in capsys.readouterr().err


def test_a_rank_that_waits_for_lost_processes_is_in_the_next_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Before it waits, its old monitor stops, to which ranks without a wait would be silent, and the new one starts.

    Spares learn of the new generation at once, because nobody sends heartbeats for the old one.
    """
    events: list[str] = []

    def start(_self: LaunchedRanks, generation: Generation, connections: Connections) -> Membership:
        events.append("start")
        return Membership(generation, RankMonitor(rank=1), connections)

    own = RunProcess.of_this_process()
    monkeypatch.setattr(launched_ranks, "agree_on_next_generation", lambda *_, **__: Generation("run", 1, [own]))
    monkeypatch.setattr(LaunchedRanks, "_start_membership", start)
    monkeypatch.setattr(RankMonitor, "stop_polling", lambda _self: events.append("stop"))
    monkeypatch.setattr(RankMonitor, "wait_until_lost_processes_end", lambda _self: events.append("wait"))
    ranks = _surviving_ranks(own)
    assert isinstance(ranks._agree_on_next_generation(), ReopenError) and events == ["stop", "start", "wait"]
    assert Generation.from_json(ranks._control.get(CURRENT).decode()).number == 1
