"""Tracks metrics as event files of TensorBoard in the run folder."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import RunFolder, Value
from drawloom.components.storage.regular_file import make_folder
from drawloom.components.trackers.background import Background, OneWarning
from drawloom.graph import UserError, above, at_least, component, setting


@component(impact="safe", needs={"tensorboard": "drawloom[tensorboard]"})
class TensorBoardTracker:
    """
    Writes `tensorboard` in the run folder, which `tensorboard --logdir RUN_FOLDER` shows.

    A resumed run adds a file that purges the steps that it does again: TensorBoard then shows one value for each.

    A thread writes, so that a slow disk can neither delay a step nor end the run: steps that are not written in time
    are dropped, with one warning. What a step has measured is in the file as soon as the thread has written it.
    """

    folder: RunFolder
    mesh: Mesh
    queue_size: int = setting(default=1000, check=at_least(1), doc="most steps queued for writing")
    timeout: float = setting(default=10.0, check=above(0), doc="seconds to wait at the end for what is queued")

    _writer_class: Any = attrs.field(init=False, default=None)
    _writer: Any = attrs.field(init=False, default=None)
    _background: Background | None = attrs.field(init=False, default=None)
    _warn: OneWarning = attrs.field(init=False, factory=OneWarning)

    def open(self) -> None:
        """
        Load TensorBoard and start the thread, on rank 0.

        Raises UserError if TensorBoard is not installed, or if the folder is a link, which may lead anywhere.
        """
        if self.mesh.world.rank == 0:
            self._writer_class = load_writer()
            make_folder(self._folder)
            self._background = Background("tensorboard", self.queue_size, self._failed, self._close_writer)

    def close(self) -> None:
        """Write queued values, within `timeout` seconds."""
        background, self._background = self._background, None
        if background is not None and not background.close(self.timeout):
            self._warn(f"TensorBoard was not done within {self.timeout:g} s; some of the last steps are missing there")

    def rewind(self, step: int) -> None:
        """Begin a file that purges the values of later steps."""
        self._put(partial(self._begin, step))

    def track(self, step: int, values: Mapping[str, Value]) -> None:
        """Queue the finite values of a step for writing."""
        self._put(partial(self._write, step, values))

    @property
    def _folder(self) -> Path:
        return self.folder.folder / "tensorboard"

    def _put(self, task: Any) -> None:
        if self._background is not None and not self._background.put(task):
            self._warn("TensorBoard does not keep up; some steps will be missing there")

    def _begin(self, step: int) -> None:
        self._close_writer()
        # an empty folder has nothing to purge
        purged = step + 1 if any(self._folder.glob("events.*")) else None
        self._writer = self._writer_class(str(self._folder), purge_step=purged)

    def _write(self, step: int, values: Mapping[str, Value]) -> None:
        if self._writer is None:
            self._begin(step - 1)
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(name, float(value), step)
        self._writer.flush()  # TensorBoard's own interval of two minutes would lose steps when the run is killed

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _failed(self, error: Exception) -> None:
        self._warn(f"TensorBoard failed, some steps will be missing there: {type(error).__name__}: {error}")


def load_writer() -> Any:
    """torch's writer of event files. Raises UserError, with what to install, if `tensorboard` is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(
            f"trackers.tensorboard: the package `tensorboard` is missing ({error}); "
            "pip install 'drawloom[tensorboard]', or remove this tracker"
        ) from error
    return SummaryWriter
