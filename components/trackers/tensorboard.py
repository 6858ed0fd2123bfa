"""Tracker that writes TensorBoard event files in the run folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from drawloom import component, internal
from drawloom.components.storage.durable_files import create_folder_unless_link
from drawloom.components.trackers.background import ServiceTracker, import_tracker_package
from drawloom.ports import Histogram, RunFolder, flatten_properties

HyperparameterValue = str | bool | int | float
"""Types of hyperparameters that TensorBoard accepts."""

TABLE_METRICS = ("loss", "validation_loss")
"""Metrics beside the hyperparameters in TensorBoard's table."""


@component(impact="safe", needs={"tensorboard": "drawloom[tensorboard]"})
class TensorBoardTracker(ServiceTracker):
    """
    TensorBoard tracker: writes `tensorboard` in the run folder, which `tensorboard --logdir RUN_FOLDER` shows.

    The recipe's settings are the hyperparameters. A resumed run adds a file that purges repeated steps, so TensorBoard
    shows them once.

    A thread writes, so a slow disk can't delay a step or end the run. Steps not written in time are dropped, with one
    warning. The thread flushes the file after every step.
    """

    called: ClassVar[str] = "TensorBoard"

    folder: RunFolder

    _writer_class: Any = internal(None)
    _writer: Any = internal(None)

    @property
    def _folder(self) -> Path:
        """The folder for event files."""
        return self.folder.folder / "tensorboard"

    def _load_package_and_create_files(self) -> None:
        self._writer_class = import_tracker_package("tensorboard", "torch.utils.tensorboard").SummaryWriter
        create_folder_unless_link(self._folder)

    def _open_writer_after(self, step: int) -> None:
        self._close_writer()
        # an empty folder has nothing to purge
        first_purged = step + 1 if any(self._folder.glob("events.*")) else None
        self._writer = self._writer_class(str(self._folder), purge_step=first_purged)
        if self._properties:
            self._write_hyperparameters()

    def _write_values(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._writer is None:
            self._open_writer_after(step - 1)
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()  # TensorBoard's own interval of two minutes would lose steps when the run is killed

    def _write_distributions(self, step: int, distributions: Mapping[str, Histogram]) -> None:
        if self._writer is None:
            self._open_writer_after(step - 1)
        for name, histogram in distributions.items():
            pairs = [*zip(histogram.counts, histogram.centers, strict=True)]
            self._writer.add_histogram_raw(
                name,
                min=histogram.low,
                max=histogram.high,
                num=sum(histogram.counts),
                sum=sum(count * center for count, center in pairs),
                sum_squares=sum(count * center**2 for count, center in pairs),
                bucket_limits=histogram.edges[1:],
                bucket_counts=histogram.counts,
                global_step=step,
            )
        self._writer.flush()

    def _write_hyperparameters(self) -> None:
        """Write the recipe's settings as hyperparameters."""
        # The writer's own `add_hparams` would add a run to the folder at every call.
        from torch.utils.tensorboard.summary import hparams

        flat = flatten_properties(self._properties)
        values = {name: value if isinstance(value, HyperparameterValue) else str(value) for name, value in flat.items()}
        for summary in hparams(values, dict.fromkeys(TABLE_METRICS, 0.0)):  # type: ignore[no-untyped-call]
            self._writer.file_writer.add_summary(summary)

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
