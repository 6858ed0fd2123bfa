"""Output, exit codes and arguments of `launch`; tests/runs starts processes."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from drawloom.components.commands.training import launch
from drawloom.components.commands.training.launch import Agent, print_failure
from drawloom.components.distributed.error_file import write_torchrun_error_file
from drawloom.components.distributed.generation import Generation, RunProcess
from drawloom.components.distributed.membership import CURRENT, Spares
from drawloom.graph.cli.main import main


def _failures(folder: Path, codes: dict[int, int], reported: dict[int, str]) -> ChildFailedError:
    """Return the failures of ranks by their exit codes; some have written error files."""
    failures = {}
    for rank, code in codes.items():
        path = folder / f"error-{rank}"
        if rank in reported:
            write_torchrun_error_file(str(path), reported[rank], is_cause=rank == min(reported))
        failures[rank] = ProcessFailure(local_rank=rank, pid=1000 + rank, exitcode=code, error_file=str(path))
    return ChildFailedError("drawloom", failures)


@pytest.mark.parametrize(
    ("codes", "reported", "code", "printed"),
    [
        ({0: 2, 1: 2}, {0: "wrong recipe", 1: "wrong recipe"}, 2, ""),
        ({1: 1, 0: 1}, {1: "a bug", 0: "a bug"}, 1, ""),
        ({0: 1, 1: -9}, {0: "rank 1 is gone"}, 1, ""),
        ({0: 143, 1: 143}, {}, 143, ""),
        ({0: 130, 1: -15}, {}, 130, ""),
        ({1: -9}, {}, 137, "rank 1 (process 1001) was ended by SIGKILL\n"),
        ({1: 7}, {}, 7, "rank 1 (process 1001) ended with code 7\n"),
    ],
)
def test_a_failure_is_printed_only_if_no_process_has(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    codes: dict[int, int],
    reported: dict[int, str],
    code: int,
    printed: str,
) -> None:
    """The exit code is the cause's, for a signal as in shells; a stopped run is not a failure."""
    assert print_failure(_failures(tmp_path, codes, reported)) == code
    assert capsys.readouterr().err == printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nproc-per-node", "2"], "there is no command to launch; write it last, such as: run first_run"),
        (["--nproc-per-node", "0", "run", "x"], "'0' is not a positive integer"),
        (["run", "x"], "the following arguments are required: --nproc-per-node"),
        (["--nproc-per-node", "2", "--nnodes", "2", "run", "x"], "several machines need --rdzv-endpoint HOST:PORT"),
        (["--nproc-per-node", "1", "--spares", "1", "run", "x"], "--spares: a run needs two processes or more"),
    ],
)
def test_wrong_arguments_are_refused_before_a_process_starts(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    """The exit code is 2, and the message shows a correct command."""
    assert main(["launch", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_error_files_follow_the_format_of_torch(tmp_path: Path) -> None:
    """A rank that learnt of another rank's failure has a later date, so torch reports the other rank as the cause."""
    for rank, is_cause in enumerate([False, True]):
        write_torchrun_error_file(str(tmp_path / f"error-{rank}"), "a bug", is_cause=is_cause)
    assert json.loads((tmp_path / "error-0").read_text())["message"]["message"] == "a bug"
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=1, error_file=str(tmp_path / f"error-{rank}"))
        for rank in (0, 1)
    }
    assert ChildFailedError("drawloom", failures).get_first_failure()[0] == 1


def test_stopped_workers_are_resumed_to_be_ended() -> None:
    """A stopped process receives SIGTERM only when it is resumed."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        os.kill(process.pid, signal.SIGSTOP)
        agent = object.__new__(Agent)
        agent._worker_watchdog = agent._health_check_server = None
        workers: Any = SimpleNamespace(subprocess_handlers={0: SimpleNamespace(proc=process)})
        workers.close = lambda *_: process.terminate()
        agent._pcontext = workers
        agent._shutdown()
        assert process.wait(10) == -signal.SIGTERM


@contextmanager
def _heartbeats(store: Any) -> Iterator[None]:
    """Let a rank on another machine send heartbeats in the context."""
    ended = threading.Event()

    def send() -> None:
        while not ended.wait(0.02):
            store.add("drawloom/run/0/beat/0", 1)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_machine_that_has_lost_all_workers_follows_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    While ranks on other machines send heartbeats, killed workers are started again up to the limit, and the launcher
    does not make all machines start again. It ends with the run, or fails when nobody sends heartbeats.
    """
    store, started = HashStore(), list[int]()
    store.set(f"drawloom/attempt/{CURRENT}", Generation("run", 0, [RunProcess("elsewhere", 7)]).to_json())
    monkeypatch.setattr(launch, "HEARTBEAT_SECONDS", 0.3)
    monkeypatch.setattr(Agent, "_connect_to_store", lambda _self, _group, name: PrefixStore(f"drawloom/{name}", store))
    monkeypatch.setattr(Agent, "_workers_survive_loss", lambda _self, _group: True)
    monkeypatch.setattr(Agent, "_start_process", lambda _self, _group, slot: started.append(slot))
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: RunResult(state=WorkerState.FAILED))
    killed = SimpleNamespace(proc=SimpleNamespace(poll=lambda: -9))
    agent = object.__new__(Agent)
    workers: Any = SimpleNamespace(subprocess_handlers={0: killed})
    agent._surviving, agent._pcontext = "attempt", workers

    def state_of(machines: int) -> WorkerState:
        spec = SimpleNamespace(max_restarts=1, local_world_size=1)
        group: Any = SimpleNamespace(group_world_size=machines, spec=spec, workers=[SimpleNamespace(global_rank=1)])
        agent._continues_until = 0.0
        return agent._monitor_workers(group).state

    with _heartbeats(store):
        assert state_of(machines=1) == WorkerState.FAILED and not started
        assert [state_of(machines=2) for _ in range(2)] == [WorkerState.HEALTHY] * 2 and started == [0]
        store.set("drawloom/run/0/failure", "{}")
        assert state_of(machines=2) == WorkerState.FAILED
        store.delete_key("drawloom/run/0/failure")
    assert state_of(machines=2) == WorkerState.FAILED
    Spares(PrefixStore("run", PrefixStore("drawloom/attempt", store))).announce_run_end(0)
    assert state_of(machines=2) == WorkerState.SUCCEEDED and started == [0]
