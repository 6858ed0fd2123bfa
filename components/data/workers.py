"""
Processes that make batches ahead of time.

They are our own and not torch's, whose DataLoader tells of a dead worker by an exception out of a signal handler,
wherever the main thread is, or after the whole timeout; and whose workers, where they are not forked from this
process, outlive it. Here each worker has one pipe: batches come back in order, the end of a process is an end of
its pipe, on either side, and nothing is left to be told.

Workers are started by multiprocessing's fork server. A fork of this process would take its locks, sockets and
accelerator with it, in whatever state its threads have them, and hold a killed run's files open.
"""

import multiprocessing
import os
import pickle
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import attrs
import numpy as np
import torch

from drawloom.components.ports.data import Batch, PackedDataset, Split
from drawloom.graph import UserError


@attrs.frozen
class Worker:
    """A process, and our end of its pipe."""

    number: int
    process: BaseProcess
    pipe: Connection

    def ask(self, rows: Sequence[int]) -> None:
        """Have a batch made. Never blocks: the worker reads at any time."""
        try:
            self.pipe.send(list(rows))
        except OSError as error:
            raise self._died() from error

    def take(self, timeout: float) -> Batch:
        """The first batch asked for and not yet taken."""
        if not wait([self.pipe, self.process.sentinel], timeout):
            hint = "give it more time (`timeout`), or write workers = 0"
            raise UserError(f"workers: {self} has given no batch for {timeout:g} seconds; {hint}")
        try:
            answer = self.pipe.recv() if self.pipe.poll() else None
        except (EOFError, OSError) as error:
            raise self._died() from error
        if answer is None:
            raise self._died()
        if isinstance(answer, str):
            raise RuntimeError(f"{self} failed:\n{answer}")
        return Batch(*map(torch.from_numpy, answer))

    def stop(self) -> None:
        """End the process, whatever it does: it holds nothing that could be lost."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()

    def _died(self) -> UserError:
        self.process.join(1)
        code = self.process.exitcode or 0
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended by itself (exit code {code})"
        hint = "look for a lack of memory and start the run again, or write workers = 0"
        return UserError(f"workers: {self} {end} while batches were wanted of it; {hint}")

    def __str__(self) -> str:
        return f"data worker {self.number} (process {self.process.pid})"


class Workers:
    """Some workers that take turns, so that batches come in the order in which they were asked for."""

    def __init__(self, rows: PackedDataset, split: Split, count: int) -> None:
        self.members: list[Worker] = []
        try:
            for number in range(count):
                self.members.append(_spawn(number, rows, split))
        except BaseException:
            self.close()
            raise
        self._turns = cycle(self.members)
        self._asked: deque[Worker] = deque()

    def batches(self, wanted: Iterator[Sequence[int]], ahead: int, timeout: float) -> Iterator[Batch]:
        """The batches of endless lists of row numbers; `ahead` are asked for before their time. It starts afresh."""
        while self._asked:
            self._asked.popleft().take(timeout)
        for rows in islice(wanted, ahead):
            self._ask(rows)
        for rows in wanted:
            batch = self._asked.popleft().take(timeout)
            self._ask(rows)
            yield batch

    def close(self) -> None:
        """End all workers."""
        while self.members:
            self.members.pop().stop()

    def _ask(self, rows: Sequence[int]) -> None:
        worker = next(self._turns)
        worker.ask(rows)
        self._asked.append(worker)


def _spawn(number: int, rows: PackedDataset, split: Split) -> Worker:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])  # over a second to import: once, and not in each worker
    ours, theirs = context.Pipe()
    process = context.Process(target=_worker_main, args=(rows, split, theirs), daemon=True)
    try:
        process.start()
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError, OSError) as error:
        kind = type(rows).__name__
        raise UserError(f"workers: {kind} can't be sent to another process ({error}); write workers = 0") from error
    finally:
        theirs.close()
    return Worker(number, process, ours)


def _worker_main(rows: PackedDataset, split: Split, pipe: Connection) -> None:
    """The life of a worker: it makes what it is asked for until its pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the run says when the workers end
    torch.set_num_threads(1)
    wanted: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, wanted), daemon=True).start()
    while True:
        answer = _answer(rows, split, wanted.get())
        try:
            pipe.send(answer)
        except OSError:
            return


def _listen(pipe: Connection, wanted: "queue.SimpleQueue[list[int]]") -> None:
    """Read at any time, so that whoever asks never waits; end with the run, even in the middle of a batch."""
    try:
        while True:
            wanted.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(0)


def _answer(rows: PackedDataset, split: Split, indices: list[int]) -> tuple[np.ndarray, ...] | str:
    """A batch as arrays, which travel by value, or what went wrong."""
    try:
        batch = rows.batch(split, indices)
        return tuple(tensor.numpy() for tensor in attrs.astuple(batch, recurse=False))
    except Exception:
        return traceback.format_exc()
