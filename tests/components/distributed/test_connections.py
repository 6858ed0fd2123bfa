"""Breaking gloo's connections from another thread."""

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from drawloom.components.distributed import connections as module
from drawloom.components.distributed.connections import Connections
from support.processes import RanksFailedError, run_ranks


def _broken() -> tuple[float, int, int]:
    """Break rank 0's wait for rank 1, which is busy; return its seconds, the broken connections, and a later sum."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    connections = Connections(port)
    with connections.record_sockets():
        group: Any = dist.ProcessGroupGloo(PrefixStore("first", store), rank, 2, timedelta(seconds=30))
    group.allreduce([torch.ones(1)]).wait()
    counts: list[int] = []
    timer = threading.Timer(0.2, lambda: counts.append(connections.break_all_connections()))
    start = time.monotonic()
    if rank == 0:
        timer.start()
        try:
            group.allreduce([torch.ones(1)]).wait()
        except RuntimeError:
            store.set("raised", "1")
        timer.join()
    store.get("raised")  # waits: neither the store's connections nor gloo's listening socket are broken
    seconds = time.monotonic() - start
    number = torch.ones(1)
    group = dist.ProcessGroupGloo(PrefixStore("second", store), rank, 2, timedelta(seconds=30))
    group.allreduce([number]).wait()
    return seconds, sum(counts), int(number)


def test_a_waiting_collective_raises_and_new_groups_can_be_made() -> None:
    """Rank 0 stops waiting for a busy rank at once, and both make another group over the same store."""
    (seconds, broken, total), (_, _, other) = run_ranks(_broken, 2)
    assert 0.2 <= seconds < 5 and broken >= 1 and total == other == 2


def _interrupt_a_partly_written_message() -> tuple[str, float]:
    """Rank 0 sends more than sockets hold to rank 1, which stops; return the error and the seconds."""
    rank, store = int(os.environ["RANK"]), TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    connections, big = Connections(), torch.zeros(100_000_000, dtype=torch.uint8)
    with connections.record_sockets():
        group: Any = dist.ProcessGroupGloo(PrefixStore("pair", store), rank, 2, timedelta(seconds=30))
    if rank == 1:
        group.recv([big], 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
    timer, start = threading.Timer(0.5, connections.break_all_connections), time.monotonic()
    with connections.make_waits_interruptible():
        work = group.send([big], 1, 0)
        timer.start()
        with pytest.raises(dist.DistNetworkError) as caught:
            work.wait()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    return str(caught.value), time.monotonic() - start


def test_an_operation_with_a_partly_written_message_is_interrupted() -> None:
    """Gloo does not wake its waiting thread when the connection breaks, but the caller raises a second later."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_interrupt_a_partly_written_message, 2, timeout=25, lost={1}, grace=25)
    [(text, seconds)] = caught.value.values.values()
    assert "did not notice" in text and 1.4 < seconds < 6


def test_connections_being_made_are_broken_and_no_more_are_made() -> None:
    """A connection opened while others are recorded is shut down, one to the store's port is not."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as store:
        connections = Connections(store.getsockname()[1])
        with (
            connections.record_sockets(),
            socket.create_connection(server.getsockname()) as made,
            socket.create_connection(store.getsockname()),
        ):
            accepted, _ = store.accept()
            assert connections.break_all_connections() == 2 and made.recv(1) == b""
            with accepted:
                assert accepted.recv(1) == b"" and accepted.send(b"the store's end is open") > 0
    assert connections.break_all_connections() == 0
    with pytest.raises(RuntimeError, match="a rank is lost"), connections.record_sockets():
        pass


def test_a_descriptor_reused_since_the_sockets_were_listed_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that gets a closed one's descriptor between listing and shutdown is not shut down in its place."""
    original = module._list_sockets_by_inode
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        connections = Connections()
        with connections.record_sockets():
            recorded = socket.create_connection(server.getsockname())
        number, unrelated = recorded.fileno(), stack.enter_context(socket.create_connection(server.getsockname()))

        def list_and_reuse() -> dict[int, int]:
            sockets = original()
            recorded.close()
            stack.enter_context(socket.socket(fileno=os.dup2(unrelated.fileno(), number)))
            return sockets

        monkeypatch.setattr(module, "_list_sockets_by_inode", list_and_reuse)
        assert connections.break_all_connections() == 0
        accepted = [stack.enter_context(server.accept()[0]) for _ in range(2)]
        assert unrelated.send(b"open") == 4 and accepted[1].recv(4) == b"open"


@pytest.mark.parametrize("mode", [False, True])
def test_a_wait_can_write_to_tensors_of_inference_mode(mode: bool) -> None:
    """A wait runs in the caller's inference mode, because gloo's reduce-scatter writes its result there."""
    with torch.inference_mode(mode):
        output = torch.zeros(1)
        Connections().call_until_broken(lambda: output.add_(1))
    assert float(output) == 1


def test_communicators_are_aborted_once_in_another_thread() -> None:
    """The thread that breaks the connections, which sends heartbeats, does not wait for an abort in progress."""
    may_end, threads = threading.Event(), []

    def abort() -> None:
        threads.append(threading.get_ident())
        may_end.wait(10)

    connections = Connections(abort_communicators=abort)
    for _ in range(2):
        connections.break_all_connections()
    may_end.set()
    connections.wait_until_aborted(10)
    assert len(threads) == 1 and threads[0] != threading.get_ident()


def _wait_for_absent() -> float:
    """Return the seconds until the wait for a rank that never connects is broken, half a second after its start."""
    connections = Connections()
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    timer = threading.Timer(0.5, connections.break_all_connections)
    start = time.monotonic()
    with connections.record_sockets(), connections.make_gloo_connecting_interruptible():
        timer.start()
        with pytest.raises(RuntimeError, match="a rank is lost"):
            dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=20))
    seconds = time.monotonic() - start
    assert dist.distributed_c10d.ProcessGroupGloo is dist.ProcessGroupGloo and not dist.is_initialized()
    return seconds


def test_waiting_for_a_rank_that_never_connects_is_broken() -> None:
    """Gloo itself would wait for a hundred seconds."""
    assert 0.4 < run_ranks(_wait_for_absent, 1)[0] < 5
