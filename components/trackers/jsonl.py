"""Tracks metrics in a file of JSON lines, truncated to the step that a run resumes from."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import KnownSteps, RunFolder, Value
from drawloom.components.storage.step_log import StepLog
from drawloom.graph import Every, component

FORMAT = 2

log = logging.getLogger("drawloom.trackers")


@component(impact="safe")
class JsonlTracker:
    """
    Writes `metrics.jsonl` in the run folder on rank 0: an object for each step, and for step 0 before training.

    Keys are `step`, then the metrics, then `format` and a checksum of the line. Floats round-trip exactly; those that
    are not finite, which JSON does not have, are null. Where a line is damaged, what a checkpoint knows of its step
    wins when the run resumes.
    """

    folder: RunFolder
    mesh: Mesh
    checkpoints: Every[KnownSteps] = attrs.field(factory=Every)

    _log: StepLog | None = attrs.field(init=False, default=None)

    def open(self) -> None:
        """Open the file for appending; a UserError if it is a link or not a regular file."""
        if self.mesh.world.rank == 0:
            self._log = StepLog.open(self._path)

    def close(self) -> None:
        """Close the file."""
        file, self._log = self._log, None
        if file is not None:
            file.close()

    def track(self, step: int, values: Mapping[str, Value]) -> None:
        """Append a line, and write it at once. If the disk does not accept it, it is written with the next line."""
        if self._log is not None:
            self._log.append(_row(step, values))

    def flush(self) -> None:
        """Return when every line is on disk; OSError if the disk does not accept some."""
        if self._log is not None:
            self._log.flush()

    def rewind(self, step: int) -> None:
        """Truncate the file to the lines up to this step; a line that a crash left incomplete is removed too."""
        if self._log is not None:
            known = {number: values for node in self.checkpoints.values() for number, values in node.known_steps()}
            last = self._log.rewind(step, {number: _row(number, values) for number, values in known.items()})
            if last < step:
                log.warning("%s lacks the rows of steps %d to %d, which were lost", self._path, last + 1, step)

    @property
    def _path(self) -> Path:
        return self.folder.folder / "metrics.jsonl"


def _row(step: int, values: Mapping[str, Value]) -> dict[str, Any]:
    return {"step": step} | {name: _plain(value) for name, value in values.items()} | {"format": FORMAT}


def _plain(value: Value) -> Value:
    return value if value is None or math.isfinite(value) else None
