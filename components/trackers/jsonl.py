"""Tracker with JSON lines, truncated to the step from which a run resumes."""

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from drawloom import Every, component, internal
from drawloom.ports import Mesh, MetricValues, Restorer, RunFolder

if TYPE_CHECKING:
    from drawloom.components.storage.step_log import StepLog

FORMAT = 2

log = logging.getLogger("drawloom.trackers")


@component(impact="safe")
class JsonlTracker:
    """
    JSON lines tracker: writes `metrics.jsonl` in the run folder, with an object per step; step 0 is before training.

    The keys are `step`, the metrics, `format` and the line's checksum. Floats round-trip exactly; NaN and infinity,
    which JSON lacks, are null. When the run resumes, a damaged line is replaced by a checkpoint's values.
    """

    folder: RunFolder
    mesh: Mesh
    checkpoints: Every[Restorer] = attrs.field(factory=Every)

    _log: "StepLog | None" = internal(None)

    def open(self) -> None:
        """Open the file for appending on rank 0. Raises UserError if it is a link or not a regular file."""
        if self.mesh.world.rank == 0:
            from drawloom.components.storage.step_log import StepLog

            self._log = StepLog.open(self._path)

    def close(self) -> None:
        """Close the file."""
        file, self._log = self._log, None
        if file is not None:
            file.close()

    def track(self, step: int, values: MetricValues) -> None:
        """Append a line, and write it at once. If the disk refuses the line, it is written with the next line."""
        if self._log is not None:
            self._log.append(_make_json_row(step, values))

    def flush(self) -> None:
        """Return when all lines are on disk. Raises OSError if the disk refuses a line."""
        if self._log is not None:
            self._log.flush()

    def rewind(self, step: int) -> None:
        """Truncate the file to the lines up to this step, without a line that a crash left incomplete."""
        if self._log is not None:
            known = {
                number: _make_json_row(number, values)
                for node in self.checkpoints.values()
                for number, values in node.recorded_step_values()
            }
            last = self._log.rewind_and_get_last_step(step, known)
            if last < step:
                log.warning("%s lacks the rows of steps %d to %d, which were lost", self._path, last + 1, step)

    @property
    def _path(self) -> Path:
        """The path of `metrics.jsonl`."""
        return self.folder.folder / "metrics.jsonl"


def _make_json_row(step: int, values: MetricValues) -> dict[str, Any]:
    """Return a step's JSON object; NaN and infinity are null."""
    finite = {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}
    return {"step": step, **finite, "format": FORMAT}
