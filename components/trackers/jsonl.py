"""Metrics as a file of JSON lines, cut back to where the run goes on from."""

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
ROOM = 2**24  # bytes of lines that wait; later ones are dropped

log = logging.getLogger("drawloom.trackers")


@component(impact="safe")
class JsonlTracker:
    """
    `metrics.jsonl` in the run folder: an object for each step, on the main rank.

    Keys are `step`, then the metrics, then `format`. Floats are written so that reading gives the same number; those
    that JSON has no word for are null.
    """

    folder: RunFolder
    mesh: Mesh

    _file: int | None = attrs.field(init=False, default=None)
    _waiting: bytes = attrs.field(init=False, default=b"")
    _warned: bool = attrs.field(init=False, default=False)

    def open(self) -> None:
        """Open the file at its end."""
        if self.mesh.world.rank == 0:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._write()
            file, self._file = self._file, None
            os.close(file)

    def track(self, step: int, values: Mapping[str, Value]) -> None:
        """Add a line, and hand it to the system at once. What the disk does not take waits for the next line."""
        if self._file is not None:
            row = {"step": step} | {name: _plain(value) for name, value in values.items()} | {"format": FORMAT}
            if len(self._waiting) < ROOM:
                self._waiting += json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
            self._write()

    def flush(self) -> None:
        """Return when every line is on the disk."""
        if self._file is not None:
            os.fsync(self._file)

    def rewind(self, step: int) -> None:
        """Cut the file back to the lines of steps up to this one; a line that a crash left half-written goes too."""
        if self._file is None:
            return
        lines = self._path.read_bytes()
        kept = b"".join(line + b"\n" for line in lines.split(b"\n") if _step_of(line) <= step)
        if lines.startswith(kept):
            os.ftruncate(self._file, len(kept))  # needs no room
        else:
            self.close()
            replace_file(self._path, kept)
            self.open()

    def _write(self) -> None:
        """Write what waits, as far as the disk takes it. The run goes on in any case."""
        try:
            while self._waiting and self._file is not None:
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning("%s: %s; lines wait until the disk takes them", self._path, error.strerror)

    @property
    def _path(self) -> Path:
        return self.folder.folder / "metrics.jsonl"


def _plain(value: Value) -> Value:
    return value if value is None or math.isfinite(value) else None


def _step_of(line: bytes) -> float:
    """The step that a line tells of; later than any if it is not whole."""
    try:
        row: Any = json.loads(line)
        return int(row["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
