"""
Worker processes, which prepare batches ahead of time.

torch's DataLoader is not used: it reports a dead worker by an exception from a signal handler, anywhere in the main
thread, or only after the timeout; and its workers outlive a killed parent unless they are forked. Here every worker has
one pipe: batches arrive in order, and the pipe closes for both processes when either one ends.

Multiprocessing's fork server starts the workers. A forked training process would inherit locks, sockets and the
GPU context while other threads use them, and keep a killed run's files open.
"""

import io
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
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom import UserError
from drawloom.components.data.child_process import ChildProcess, start_process_with_pipe
from drawloom.components.storage.tensor_source import view_bytes
from drawloom.ports import Batch, PackedDataset, Split, TracedRows

MAX_NAMES_SHOWN = 4  # rows and documents in a message


class WorkerLostError(Exception):
    """A worker that died or hung; `hint` is the remedy."""

    def __init__(self, text: str, hint: str) -> None:
        super().__init__(text)
        self.hint = hint


@attrs.frozen
class Worker:
    """A worker process, numbered from 0."""

    number: int
    child: ChildProcess

    def request_batch(self, rows: Sequence[int]) -> None:
        """Request a batch without blocking: the worker reads requests in a thread."""
        try:
            self.child.pipe.send(list(rows))
        except OSError as error:
            raise self._make_lost_error() from error

    def wait_for_batch(self, timeout: float) -> Batch:
        """Return the oldest requested batch. Raises WorkerLostError if it does not arrive within `timeout` seconds."""
        # wait for the sentinel too, so that a dead worker is noticed before the timeout
        if not wait([self.child.pipe, self.child.process.sentinel], timeout):
            hint = "give it more time (`timeout`), or write workers = 0"
            raise WorkerLostError(f"within {timeout:g} s, {self} did not deliver", hint)
        try:
            answer = self.child.pipe.recv() if self.child.pipe.poll() else None
        except (EOFError, OSError) as error:
            raise self._make_lost_error() from error
        if answer is None:
            raise self._make_lost_error()
        if isinstance(answer, UserError):
            raise answer
        if isinstance(answer, str):
            raise RuntimeError(f"{self} failed:\n{answer}")
        batch: Batch = answer
        return batch

    def _make_lost_error(self) -> WorkerLostError:
        """Return the error for a process that has ended, with how it ended."""
        hint = "check for a lack of memory and start the run again, or write workers = 0"
        return WorkerLostError(f"{self} {self.child.wait_and_describe_exit()} before it delivered", hint)

    def __str__(self) -> str:
        return f"data worker {self.number} (process {self.child.process.pid})"


class Workers:
    """Worker processes in turn, so batches arrive in the requested order."""

    def __init__(self, rows: PackedDataset, split: Split, count: int) -> None:
        self.members: list[Worker] = []
        try:
            for number in range(count):
                self.members.append(_start_worker(number, rows, split))
        except BaseException:
            self.close()
            raise
        self._rows, self._split = rows, split
        self._turns = cycle(self.members)
        self._requested: deque[tuple[Worker, Sequence[int]]] = deque()

    def batches(self, requests: Iterator[Sequence[int]], batches_ahead: int, timeout: float) -> Iterator[Batch]:
        """Yield batches for an endless iterator over row indices, with `batches_ahead` requests in flight."""
        # batches that an earlier iterator requested are discarded
        while self._requested:
            self._wait_for_next_batch(timeout)
        for rows in islice(requests, batches_ahead):
            self._request_batch(rows)
        for rows in requests:
            batch = self._wait_for_next_batch(timeout)
            self._request_batch(rows)
            yield batch

    def close(self) -> None:
        """Kill all workers."""
        while self.members:
            self.members.pop().child.kill_and_close()

    def _request_batch(self, rows: Sequence[int]) -> None:
        """Request a batch from the next worker. Raises UserError if the worker has ended."""
        worker = next(self._turns)
        try:
            worker.request_batch(rows)
        except WorkerLostError as lost:
            raise UserError(f"workers: {lost} {self._describe_rows(rows)}; {lost.hint}") from lost
        self._requested.append((worker, rows))

    def _wait_for_next_batch(self, timeout: float) -> Batch:
        """Return the oldest requested batch. Errors name its rows and their sources."""
        worker, rows = self._requested.popleft()
        try:
            return worker.wait_for_batch(timeout)
        except WorkerLostError as lost:
            raise UserError(f"workers: {lost} {self._describe_rows(rows)}; {lost.hint}") from lost

    def _describe_rows(self, rows: Sequence[int]) -> str:
        """Describe a batch's first rows, with their documents' files and offsets."""
        described = f"row{'s' * (len(rows) > 1)} {_join_first_names(map(str, rows))} of {self._split}"
        if not isinstance(self._rows, TracedRows):
            return described
        sources = dict.fromkeys(
            source for row in rows[:MAX_NAMES_SHOWN] for source in self._rows.describe_row_origins(self._split, row)
        )
        return f"{described} (of {_join_first_names(sources)})"


def _start_worker(number: int, rows: PackedDataset, split: Split) -> Worker:
    """Start a worker process. Raises UserError if the rows can't be pickled."""
    context = multiprocessing.get_context("forkserver")
    # importing torch takes over a second; preloaded, it is imported once for all workers
    context.set_forkserver_preload(["torch"])
    try:
        return Worker(number, start_process_with_pipe(context, _answer_batch_requests, rows, split))
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError, OSError) as error:
        kind = type(rows).__name__
        raise UserError(f"workers: {kind} can't be sent to another process ({error}); write workers = 0") from error


def _answer_batch_requests(rows: PackedDataset, split: Split, pipe: Connection) -> None:
    """Run in the worker process: send a batch, or an error, for every request until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C signals every process; the run ends its workers
    torch.set_num_threads(1)  # the cores belong to training
    requests: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    threading.Thread(target=_queue_requests_then_exit_process, args=(pipe, requests), daemon=True).start()
    while True:
        answer = _build_batch_or_error(rows, split, requests.get())
        try:
            pipe.send_bytes(TensorPickler.dumps(answer))
        except OSError:
            return


def _queue_requests_then_exit_process(pipe: Connection, requests: "queue.SimpleQueue[list[int]]") -> None:
    """Read requests in a thread, so requesting never blocks; end the process with the run, even during a batch."""
    try:
        while True:
            requests.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(0)


def _build_batch_or_error(rows: PackedDataset, split: Split, indices: list[int]) -> Batch | UserError | str:
    """Return a batch, a UserError, or another error's traceback."""
    try:
        return rows.batch(split, indices)
    except UserError as error:
        return UserError(str(error), error.exit_code)
    except Exception:
        return traceback.format_exc()


class TensorPickler(pickle.Pickler):
    """Pickler with tensor copies: multiprocessing's pickler shares memory, and torch's is slower."""

    @classmethod
    def dumps(cls, value: Any) -> bytes:
        """Return the pickled value."""
        file = io.BytesIO()
        cls(file, pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild a tensor; conversion to numpy would not support every dtype."""
        if not isinstance(value, Tensor):
            return NotImplemented
        return _rebuild_tensor, (pickle.PickleBuffer(view_bytes(value)), value.dtype, tuple(value.shape))


def _rebuild_tensor(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor over these bytes, without another copy."""
    memory = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return memory.view(dtype).view(shape)


def _join_first_names(names: Iterable[str]) -> str:
    """Join the first MAX_NAMES_SHOWN names, and count the rest."""
    listed = list(names)
    return ", ".join(listed[:MAX_NAMES_SHOWN]) + (
        f" and {len(listed) - MAX_NAMES_SHOWN} more" if len(listed) > MAX_NAMES_SHOWN else ""
    )
