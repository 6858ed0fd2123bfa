"""Tracks metrics in a file of JSON lines, truncated to the step that a run resumes from."""

import errno
import json
import logging
import math
import os
import threading
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import RunFolder, Value
from drawloom.components.storage.durable_files import replace_file
from drawloom.components.storage.regular_file import open_to_append
from drawloom.graph import component

FORMAT = 1
BUFFER_SIZE = 2**24  # bytes of lines that the disk has not accepted yet; further ones are dropped

log = logging.getLogger("drawloom.trackers")


@component(impact="safe")
class JsonlTracker:
    """
    Writes `metrics.jsonl` in the run folder on rank 0: an object for each step.

    Keys are `step`, then the metrics, then `format`. Floats round-trip exactly; those that are not finite, which JSON
    does not have, are null.
    """

    folder: RunFolder
    mesh: Mesh

    _file: int | None = attrs.field(init=False, default=None)
    _buffer: bytes = attrs.field(init=False, default=b"")
    _warned: bool = attrs.field(init=False, default=False)
    _written: int = attrs.field(init=False, default=0)  # the last step whose line the disk has accepted
    _tracked: int = attrs.field(init=False, default=0)  # the last step
    # A checkpoint that is written in the background flushes from its own thread.
    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)

    def open(self) -> None:
        """Open the file for appending; a UserError if it is a link or not a regular file."""
        if self.mesh.world.rank == 0:
            self._file = open_to_append(self._path)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._write()
            if self._file is not None:
                file, self._file = self._file, None
                os.close(file)

    def track(self, step: int, values: Mapping[str, Value]) -> None:
        """Append a line, and write it at once. If the disk does not accept it, it is written with the next line."""
        if self._file is not None:
            row = {"step": step} | {name: _plain(value) for name, value in values.items()} | {"format": FORMAT}
            with self._lock:
                if len(self._buffer) < BUFFER_SIZE:
                    self._buffer += json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
                self._tracked = step
                self._write()

    def flush(self) -> None:
        """Return when every line is on disk; OSError if the disk does not accept some."""
        with self._lock:
            self._write()
            if self._buffer:
                missing = f"the rows of steps {self._written + 1} to {self._tracked} are in memory only"
                raise OSError(errno.ENOSPC, missing, str(self._path))
        if self._file is not None:
            os.fsync(self._file)  # write(2) alone survives a kill, but no power cut

    def rewind(self, step: int) -> None:
        """Truncate the file to the lines up to this step; a line that a crash left incomplete is removed too."""
        if self._file is None:
            return
        self._written = self._tracked = step
        lines = self._path.read_bytes()
        rows = [line for line in lines.split(b"\n") if _step_of(line) <= step]
        kept = b"".join(line + b"\n" for line in rows)
        if (last := _step_of(rows[-1]) if rows else 0) < step:
            log.warning("%s lacks the rows of steps %d to %d, which were lost", self._path, last + 1, step)
        # usually later lines are removed from the end; a damaged line in the middle needs a new file
        if lines.startswith(kept):
            os.ftruncate(self._file, len(kept))  # works on a full disk too
        else:
            self.close()
            replace_file(self._path, kept)
            self.open()

    def _write(self) -> None:
        """Write the buffered lines, as far as the disk accepts them; an error is only a warning."""
        try:
            self._restore_if_removed()
            # os.write may write a part only, on a disk that is nearly full
            while self._buffer and self._file is not None:
                self._buffer = self._buffer[os.write(self._file, self._buffer) :]
            self._written = self._tracked
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning("%s: %s; lines are kept in memory until the disk accepts them", self._path, error.strerror)

    def _restore_if_removed(self) -> None:
        """Write the file anew if it was removed: its lines are still readable through the open descriptor."""
        if self._file is None or _is_at(self._file, self._path):
            return
        if not os.path.lexists(self._path):  # if not, an editor has replaced it
            replace_file(self._path, os.pread(self._file, os.fstat(self._file).st_size, 0))
            log.warning("%s was removed during the run, and is written anew", self._path)
        file, self._file = self._file, open_to_append(self._path)
        os.close(file)

    @cached_property
    def _path(self) -> Path:
        return self.folder.folder / "metrics.jsonl"


def _is_at(file: int, path: Path) -> bool:
    """Whether the path is that of the open file."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False


def _plain(value: Value) -> Value:
    return value if value is None or math.isfinite(value) else None


def _step_of(line: bytes) -> float:
    """The step of a line; infinity if it is incomplete."""
    try:
        row: Any = json.loads(line)
        return int(row["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
