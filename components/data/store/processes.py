"""Tokenizing processes; every process has a pipe, and ends with its parent process."""

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs

from drawloom import UserError
from drawloom.components.data.child_process import ChildProcess, start_process_with_pipe
from drawloom.components.data.sources.documents import Part
from drawloom.components.data.store.tokenizing import Progress, tokenize_part_into_shard
from drawloom.graph.lifecycle import Openable
from drawloom.ports import Tokenizer

TICK = 1.0  # seconds between checks of the progress


def tokenize_in_processes(
    folder: Path, parts: dict[int, Part], tokenizer: Tokenizer, count: int, progress: Progress, lock: int
) -> None:
    """Write shards for these parts, by number, in `count` processes, which hold the lock too."""
    waiting = deque(parts.items())
    processes = [_start_tokenizing_process(folder, make_unopened_copy(tokenizer), lock) for _ in range(count)]
    try:
        for child in processes:
            child.pipe.send(waiting.popleft())
        _distribute_parts(processes, waiting, progress)
    finally:
        for child in processes:
            child.kill_and_close()


def make_unopened_copy(tokenizer: Tokenizer) -> Tokenizer:
    """
    Return an unopened copy of a tokenizer for another process, because some open tokenizers can't be pickled, or lose
    settings.
    """
    fresh: Tokenizer = attrs.evolve(tokenizer) if attrs.has(type(tokenizer)) else tokenizer  # type: ignore[misc]
    return fresh


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
                hint = "check for a lack of memory; run the same command again to complete the store"
                end = child.wait_and_describe_exit()
                raise UserError(f"a process that tokenizes ({child.process.pid}) {end}; {hint}") from error
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

                def report(characters: int, tokens: int, number: int = number) -> None:
                    pipe.send(("batch", number, characters, tokens))

                tokenize_part_into_shard(folder, number, part, tokenizer, report)
                pipe.send(("done", number))
        except (EOFError, BrokenPipeError):
            raise
        except BaseException as error:
            can_be_pickled = isinstance(error, UserError | OSError)
            pipe.send(("error", error if can_be_pickled else RuntimeError(traceback.format_exc())))
