"""
Worker processes that make batches ahead of time.

torch's DataLoader is not used: it reports a dead worker by an exception from a signal handler, anywhere in the main
thread, or only after the timeout; and its workers outlive a killed parent unless they are forked. Here each worker has
one pipe: batches come back in order, and the end of either process closes the pipe for the other.

Workers are started by multiprocessing's fork server. A fork of this process would inherit its locks, sockets and GPU
context in whatever state its threads have them, and hold a killed run's files open.
"""

import multiprocessing
import os
import pickle
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from multiprocessing.connection import Connection, wait

import attrs
import numpy as np
import torch
from torch import Tensor

from drawloom.components.data.child_process import ChildProcess, start_child
from drawloom.components.ports.corpus import Split
from drawloom.components.ports.data import Batch, PackedDataset, TracedRows
from drawloom.graph import UserError

MOST = 4  # rows and documents that an error names


class WorkerLostError(Exception):
    """A batch will not come; `hint` is what to do about it."""

    def __init__(self, text: str, hint: str) -> None:
        super().__init__(text)
        self.hint = hint


@attrs.frozen
class Worker:
    """A worker process, numbered from 0."""

    number: int
    child: ChildProcess

    def request(self, rows: Sequence[int]) -> None:
        """Request a batch. Never blocks: the worker reads requests in a thread."""
        try:
            self.child.pipe.send(list(rows))
        except OSError as error:
            raise self._died() from error

    def take(self, timeout: float) -> Batch:
        """The oldest requested batch; waits up to `timeout` seconds."""
        # the sentinel too: a worker that dies must not cost the whole timeout
        if not wait([self.child.pipe, self.child.process.sentinel], timeout):
            hint = "give it more time (`timeout`), or write workers = 0"
            raise WorkerLostError(f"{self} has for {timeout:g} seconds not given", hint)
        try:
            answer = self.child.pipe.recv() if self.child.pipe.poll() else None
        except (EOFError, OSError) as error:
            raise self._died() from error
        if answer is None:
            raise self._died()
        if isinstance(answer, UserError):
            raise answer
        if isinstance(answer, str):
            raise RuntimeError(f"{self} failed:\n{answer}")
        arrays, padding = answer
        return Batch.from_numpy(**arrays, padding=padding)

    def _died(self) -> WorkerLostError:
        hint = "check for a lack of memory and start the run again, or write workers = 0"
        return WorkerLostError(f"{self} {self.child.end()} before it delivered", hint)

    def __str__(self) -> str:
        return f"data worker {self.number} (process {self.child.process.pid})"


class Workers:
    """Workers that take turns, so that batches come in the order of the requests."""

    def __init__(self, rows: PackedDataset, split: Split, count: int) -> None:
        self.members: list[Worker] = []
        try:
            for number in range(count):
                self.members.append(_spawn(number, rows, split))
        except BaseException:
            self.close()
            raise
        self._rows, self._split = rows, split
        self._turns = cycle(self.members)
        self._requested: deque[tuple[Worker, Sequence[int]]] = deque()

    def batches(self, wanted: Iterator[Sequence[int]], ahead: int, timeout: float) -> Iterator[Batch]:
        """The batches of an endless iterator of row indices, `ahead` of which are requested in advance."""
        # batches that an earlier iterator requested are discarded
        while self._requested:
            self._take(timeout)
        for rows in islice(wanted, ahead):
            self._request(rows)
        for rows in wanted:
            batch = self._take(timeout)
            self._request(rows)
            yield batch

    def close(self) -> None:
        """End all workers."""
        while self.members:
            self.members.pop().child.stop()

    def _request(self, rows: Sequence[int]) -> None:
        worker = next(self._turns)
        try:
            worker.request(rows)
        except WorkerLostError as error:
            raise UserError(f"workers: {error} {self._described(rows)}; {error.hint}") from error
        self._requested.append((worker, rows))

    def _take(self, timeout: float) -> Batch:
        """The oldest requested batch. An error names the rows that it should have, and where they come from."""
        worker, rows = self._requested.popleft()
        try:
            return worker.take(timeout)
        except WorkerLostError as error:
            raise UserError(f"workers: {error} {self._described(rows)}; {error.hint}") from error

    def _described(self, rows: Sequence[int]) -> str:
        """The first rows of a batch, and the files and offsets of their documents."""
        described = f"row{'s' * (len(rows) > 1)} {_some(map(str, rows))} of {self._split}"
        if not isinstance(self._rows, TracedRows):
            return described
        sources = dict.fromkeys(source for row in rows[:MOST] for source in self._rows.sources(self._split, row))
        return f"{described} (of {_some(sources)})"


def _spawn(number: int, rows: PackedDataset, split: Split) -> Worker:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])  # its import takes over a second: once, and not in each worker
    try:
        return Worker(number, start_child(context, _worker_main, rows, split))
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError, OSError) as error:
        kind = type(rows).__name__
        raise UserError(f"workers: {kind} can't be sent to another process ({error}); write workers = 0") from error


def _worker_main(rows: PackedDataset, split: Split, pipe: Connection) -> None:
    """The main function of a worker: make the requested batches until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C signals every process; the run ends its workers
    torch.set_num_threads(1)  # the cores belong to training
    wanted: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, wanted), daemon=True).start()
    while True:
        answer = _answer(rows, split, wanted.get())
        try:
            pipe.send(answer)
        except OSError:
            return


def _listen(pipe: Connection, wanted: "queue.SimpleQueue[list[int]]") -> None:
    """Read requests in a thread, so that requesting never blocks; exit with the run, even during a batch."""
    try:
        while True:
            wanted.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(0)


def _answer(
    rows: PackedDataset, split: Split, indices: list[int]
) -> tuple[dict[str, np.ndarray], int] | UserError | str:
    """A batch as arrays, which are sent by value, and its padding; or what is wrong, for the user or a traceback."""
    try:
        batch = rows.batch(split, indices)
        fields = attrs.asdict(batch, recurse=False)
        return {name: value.numpy() for name, value in fields.items() if isinstance(value, Tensor)}, batch.padding
    except UserError as error:
        return UserError(str(error), error.exit_code)
    except Exception:
        return traceback.format_exc()


def _some(names: Iterable[str]) -> str:
    """The first of many."""
    found = list(names)
    return ", ".join(found[:MOST]) + (f" and {len(found) - MOST} more" if len(found) > MOST else "")
