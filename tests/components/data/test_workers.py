"""Worker processes for making batches ahead of time."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom.components.data.packing.padded import Padded
from drawloom.components.data.tokenized import Tokenized
from drawloom.components.data.workers import Workers
from drawloom.graph import UserError
from support.clips import ClipRows, Clips, clips
from support.processes import is_alive
from support.stores import store_of

RowsOf = Callable[..., Any]


@contextmanager
def spawn_workers(rows: Any, number: int) -> Iterator[Workers]:
    workers = Workers(rows, "train", number)
    try:
        yield workers
    finally:
        workers.close()


def ones(first: int = 0) -> Iterator[list[int]]:
    """Return one row after another."""
    return ([number % 50] for number in count(first))


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("ahead", [1, 7])
def test_batches_come_in_the_order_of_the_requests(rows_of: RowsOf, names: Any, number: int, ahead: int) -> None:
    """For any number of workers and prefetched batches, also for a second iterator."""
    with spawn_workers(rows_of(train=50), number) as workers:
        for first in (0, 5):
            batches = list(islice(workers.batches(ones(first), ahead, timeout=30), 60))
            assert names(batches) == list(islice(ones(first), 60))


def test_large_requests_and_large_batches_do_not_block(rows_of: RowsOf) -> None:
    """Requests and batches far larger than a pipe's buffer do not deadlock."""
    wanted: list[list[int]] = [list(range(50)) * 1_000] * 3  # 100 kB each
    with spawn_workers(rows_of(train=50), 1) as workers:
        batches = list(workers.batches(iter(wanted * 2), batches_ahead=3, timeout=30))
        assert [batch.row_count for batch in batches] == [50_000] * 3


def test_every_leaf_of_an_own_batch_comes_from_another_process() -> None:
    """Trees of tensors, dtypes missing in numpy, tensors without dimensions, and host values arrive unchanged."""
    with spawn_workers(ClipRows(), 1) as workers:
        batch: Any = next(workers.batches(iter([[3, 5]] * 2), 1, timeout=30))
    wanted = clips([3, 5])
    assert type(batch) is Clips and batch.skipped == 2 and batch.mask is None
    assert [tensor.dtype for tensor in batch.tensors()] == [tensor.dtype for tensor in wanted.tensors()]
    assert all(map(torch.equal, batch.tensors(), wanted.tensors()))


def test_batches_can_be_written_to(rows_of: RowsOf) -> None:
    """A batch from a worker owns its memory."""
    with spawn_workers(rows_of(train=50), 1) as workers:
        next(workers.batches(ones(), 1, timeout=30)).weights.fill_(0)


def test_a_killed_worker_is_an_error_at_once(rows_of: RowsOf) -> None:
    """It ends the run within seconds, long before the timeout, with the signal in the message."""
    with spawn_workers(rows_of(train=50), 2) as workers:
        batches = workers.batches(ones(), 4, timeout=600)
        next(batches)
        os.kill(workers.members[1].child.process.pid or 0, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(UserError, match=r"data worker 1 \(process \d+\) was killed by SIGKILL before .* row \d+"):
            list(islice(batches, 20))
        assert time.monotonic() - start < 5


def test_an_interrupt_does_not_end_workers(rows_of: RowsOf, names: Any) -> None:
    """Ctrl-C signals every process in the terminal; the run still needs the batches for its last step."""
    with spawn_workers(rows_of(train=50), 1) as workers:
        batches = workers.batches(ones(), 1, timeout=30)
        next(batches)
        os.kill(workers.members[0].child.process.pid or 0, signal.SIGINT)
        time.sleep(0.05)
        assert names(list(islice(batches, 3))) == [[1], [2], [3]]


def test_a_hanging_worker_is_an_error_after_the_timeout(rows_of: RowsOf) -> None:
    """Stopping it does not wait for it."""
    with spawn_workers(rows_of(train=50), 1) as workers:
        next(workers.batches(ones(), 1, timeout=60))
        os.kill(workers.members[0].child.process.pid or 0, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(UserError, match=r"within 0\.5 s, data worker 0 .* did not deliver row \d of train"):
            next(workers.batches(ones(), 1, timeout=0.5))
    assert time.monotonic() - start < 5


def test_an_error_in_a_worker_has_its_traceback(rows_of: RowsOf) -> None:
    """The exception in this process contains the worker's traceback."""
    with (
        spawn_workers(rows_of(train=50), 1) as workers,
        pytest.raises(RuntimeError, match=r"(?s)data worker 0.*packed_rows\.py.*Index"),
    ):
        next(workers.batches(iter([[99], [0]]), 1, timeout=30))


def test_rows_that_cannot_be_pickled_are_refused() -> None:
    """The error names the setting to change, and no process is left."""
    rows: Any = type("Rows", (), {"unsendable": lambda: None})()
    with pytest.raises(UserError, match=r"Rows can't be sent to another process.*write workers = 0"):
        Workers(rows, "train", 2)


def test_closing_ends_every_process(rows_of: RowsOf) -> None:
    """No process is left, even if none ever returned a batch."""
    workers = Workers(rows_of(train=50), "train", 2)
    pids = [member.child.process.pid or 0 for member in workers.members]
    workers.close()
    assert not any(is_alive(pid) for pid in pids)


RUN = """
import attrs, sys, time
from itertools import count
import numpy as np
from drawloom.components.data.packing.concatenated import Concatenated
from drawloom.components.data.packing.batches import PackedSplit
from drawloom.components.data.packing.batches import JoinedIndexes
from drawloom.components.data.token_arrays import TokenArrays
from drawloom.components.data.workers import Workers

documents = TokenArrays.concatenate([np.arange(1, 100_000)], np.uint32)
rows = Concatenated(tokens=None, job=None, length=4)
rows._splits["train"] = PackedSplit(documents, JoinedIndexes((rows.build_row_index(documents.lengths, None),), (0,)))
workers = Workers(rows, "train", 3)
next(workers.batches((list(range(20_000)) for _ in count()), 1, 30))
print(*(member.child.process.pid for member in workers.members), flush=True)
time.sleep(60)
"""


def test_workers_end_when_the_run_is_killed() -> None:
    """After SIGKILL of the run no worker is left, whether idle or with an unread batch."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True, env=environment) as run:
        pids = [int(word) for word in run.stdout.readline().split()] if run.stdout else []
        assert len(pids) == 3 and all(is_alive(pid) for pid in pids)
        run.kill()
    deadline = time.monotonic() + 5
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_file_that_a_worker_cannot_read_is_named(tmp_path: Path, job: Any) -> None:
    """The error is one for the user, with the source of the document and its offset there, and not a traceback."""
    store_of(tmp_path / "store", [["abcdef", "ghi"]])
    tokens = Tokenized(path=tmp_path / "store", validation_fraction=0.0)
    tokens.open()
    rows = Padded(tokens=tokens, job=job, length=8)
    rows.open()
    with spawn_workers(rows, 1) as workers:
        # the worker maps the file when it first reads from it
        os.truncate(tmp_path / "store" / "00000.tokens", 4)
        with pytest.raises(UserError, match=r"^part 0:[01]: tokens 0 to \d can't be read \(ValueError: mmap length"):
            next(workers.batches(ones(), 1, timeout=60))


def test_the_documents_of_a_dead_workers_rows_are_named(rows_of: RowsOf) -> None:
    """A worker killed by a document can't name it, so the error names the requested rows."""
    with spawn_workers(rows_of(train=50), 1) as workers:
        batches = workers.batches(iter([[number, 1, 2, 3, 4, 5] for number in range(9)]), 1, timeout=600)
        next(batches)
        killed = workers.members[0].child.process.pid or 0
        resource.prlimit(killed, resource.RLIMIT_CORE, (0, 0))
        os.kill(killed, signal.SIGBUS)
        expected = r"was killed by SIGBUS before it delivered rows \d, 1, 2, 3 and 2 more of train \(of document 0\)"
        with pytest.raises(UserError, match=expected):
            list(batches)
