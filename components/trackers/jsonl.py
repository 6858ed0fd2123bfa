"""Tracks metrics in a file of JSON lines, truncated to the step that a run resumes from."""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import RunFolder, Value
from drawloom.components.storage.atomic_write import replace_file
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

    def open(self) -> None:
        """Open the file for appending."""
        if self.mesh.world.rank == 0:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._write()
            file, self._file = self._file, None
            os.close(file)

    def track(self, step: int, values: Mapping[str, Value]) -> None:
        """Append a line, and write it at once. If the disk does not accept it, it is written with the next line."""
        if self._file is not None:
            row = {"step": step} | {name: _plain(value) for name, value in values.items()} | {"format": FORMAT}
            if len(self._buffer) < BUFFER_SIZE:
                self._buffer += json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
            self._write()

    def flush(self) -> None:
        """Return when every line is on disk."""
        if self._file is not None:
            os.fsync(self._file)  # write(2) alone survives a kill, but no power cut

    def rewind(self, step: int) -> None:
        """Truncate the file to the lines up to this step; a line that a crash left incomplete is removed too."""
        if self._file is None:
            return
        lines = self._path.read_bytes()
        kept = b"".join(line + b"\n" for line in lines.split(b"\n") if _step_of(line) <= step)
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
            # os.write may write a part only, on a disk that is nearly full
            while self._buffer and self._file is not None:
                self._buffer = self._buffer[os.write(self._file, self._buffer) :]
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning("%s: %s; lines are kept in memory until the disk accepts them", self._path, error.strerror)

    @property
    def _path(self) -> Path:
        return self.folder.folder / "metrics.jsonl"


def _plain(value: Value) -> Value:
    return value if value is None or math.isfinite(value) else None


def _step_of(line: bytes) -> float:
    """The step of a line; infinity if it is incomplete."""
    try:
        row: Any = json.loads(line)
        return int(row["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
