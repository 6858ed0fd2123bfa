"""Tokenizing processes; every process has a pipe, and ends with its parent process."""

import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.data.child_process import ChildProcess, start_process_with_pipe
from drawloom.components.data.sources.documents import Part
from drawloom.components.data.store.encode import make_unopened_copy, tokenize_part_into_shard
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.storage.byte_size import format_decimal_byte_size
from drawloom.graph import UserError
from drawloom.graph.lifecycle import Openable


@attrs.define
class Progress:
    """
    Progress counter, with a report every `interval` seconds.

    sizes: bytes by part number, for incomplete parts; `complete`: bytes in parts complete at the start.
    """

    sizes: Mapping[int, int]
    complete: int
    say: Callable[[str], None]
    interval: float
    clock: Callable[[], float] = time.monotonic
    _read: dict[int, int] = attrs.field(init=False, factory=dict)
    _tokens: int = attrs.field(init=False, default=0)
    _started: float = attrs.field(init=False)
    _last_shown: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._started = self._last_shown = self.clock()

    def add_batch(self, part: int, characters: int, tokens: int) -> None:
        """Add a batch to a part's progress; characters count as bytes, up to the part's size."""
        self._read[part] = min(self._read.get(part, 0) + characters, self.sizes[part])
        self._tokens += tokens
        self.report_if_due()

    def finish_part(self, part: int) -> None:
        """Count a whole part as read, whatever its batches counted."""
        self._read[part] = self.sizes[part]

    def report_if_due(self) -> None:
        """Report the progress if `interval` seconds have passed since the last report."""
        if self.clock() - self._last_shown >= self.interval:
            self._last_shown = self.clock()
            self.say(str(self))

    def __str__(self) -> str:
        read, total = sum(self._read.values()), sum(self.sizes.values())
        seconds = max(self.clock() - self._started, 1e-9)
        percent = 100 * (self.complete + read) / max(self.complete + total, 1)
        rate = f"{self._tokens / seconds / 1e6:.2f} M tokens/s"
        left = f", {format_duration((total - read) * seconds / read)} left" if read else ""
        done, whole = (format_decimal_byte_size(self.complete + size) for size in (read, total))
        return f"tokenized {done} of {whole} ({percent:.0f} %), {rate}{left}"


def format_duration(seconds: float) -> str:
    """Format a time span in seconds, minutes, or hours and minutes."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


TICK = 1.0  # seconds between checks of the progress


def tokenize_parts_into_shards(
    folder: Path, parts: dict[int, Part], tokenizer: Tokenizer, workers: int, progress: Progress, lock: int
) -> None:
    """
    Write shards for these parts, by number, in up to `workers` processes; in the current one if one suffices.

    The descriptor `lock` holds the folder's lock. The processes hold it too: otherwise a process that briefly outlives
    this one could remove the next one's files. Raises a part's first error, or UserError if a process dies; complete
    shards stay.
    """
    if min(workers, len(parts)) <= 1:
        for number, part in parts.items():
            tokenize_part_into_shard(folder, number, part, tokenizer, partial(progress.add_batch, number))
            progress.finish_part(number)
        return
    waiting = deque(parts.items())
    processes = [
        _start_tokenizing_process(folder, make_unopened_copy(tokenizer), lock) for _ in range(min(workers, len(parts)))
    ]
    try:
        for child in processes:
            child.pipe.send(waiting.popleft())
        _distribute_parts(processes, waiting, progress)
    finally:
        for child in processes:
            child.kill_and_close()


def _distribute_parts(
    processes: Sequence[ChildProcess], waiting: "deque[tuple[int, Part]]", progress: Progress
) -> None:
    """Receive the processes' reports, and send waiting parts to idle processes, until all parts are complete."""
    busy = {child.pipe: child for child in processes}
    while busy:
        for ready in wait([*busy, *(child.process.sentinel for child in busy.values())], TICK):
            if not isinstance(ready, Connection):
                continue
            child = busy[ready]
            try:
                kind, *values = ready.recv()
            except (EOFError, OSError) as error:
                raise _make_dead_process_error(child) from error
            if kind == "error":
                raise values[0]
            if kind == "batch":
                progress.add_batch(*values)
            else:
                progress.finish_part(*values)
                if waiting:
                    ready.send(waiting.popleft())
                else:
                    del busy[ready]
        progress.report_if_due()


def _make_dead_process_error(child: ChildProcess) -> UserError:
    """Return the error for a dead process."""
    hint = "check for a lack of memory; run the same command again to complete the store"
    return UserError(f"a process that tokenizes ({child.process.pid}) {child.wait_and_describe_process_exit()}; {hint}")


def _start_tokenizing_process(folder: Path, tokenizer: Tokenizer, lock: int) -> ChildProcess:
    """Start a tokenizing process, and pass it the lock."""
    lock_connection = Connection(os.dup(lock))  # a Connection can be passed to a process, unlike a bare descriptor
    try:
        # spawn, because a fork would copy the memory of a training rank
        return start_process_with_pipe(
            multiprocessing.get_context("spawn"), _tokenize_received_parts, folder, tokenizer, lock_connection
        )
    finally:
        lock_connection.close()


def _report_batch(pipe: Connection, part: int, characters: int, tokens: int) -> None:
    """Report a batch's characters and tokens to the parent process."""
    pipe.send(("batch", part, characters, tokens))


def _tokenize_received_parts(folder: Path, tokenizer: Any, _lock: Connection, pipe: Connection) -> None:
    """Write shards for the parts that arrive through the pipe, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C signals every process; the one that started this ends it
    os.environ["RAYON_NUM_THREADS"] = "1"  # disables the threads of the package tokenizers: each process has one core
    with suppress(EOFError, OSError):
        try:
            if isinstance(tokenizer, Openable):
                tokenizer.open()
            while True:
                number, part = pipe.recv()
                tokenize_part_into_shard(folder, number, part, tokenizer, partial(_report_batch, pipe, number))
                pipe.send(("done", number))
        except (EOFError, BrokenPipeError):
            raise
        except BaseException as error:
            can_be_pickled = isinstance(error, UserError | OSError)
            pipe.send(("error", error if can_be_pickled else RuntimeError(traceback.format_exc())))
