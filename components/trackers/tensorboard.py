"""Tracks metrics as event files of TensorBoard in the run folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import attrs

from drawloom.components.ports.run import RunFolder
from drawloom.components.ports.tracking import Histogram, flat_properties
from drawloom.components.storage.regular_file import make_folder
from drawloom.components.trackers.background import ServiceTracker
from drawloom.graph import UserError, component

PLAIN = str | bool | int | float
"""What TensorBoard takes as hyperparameters."""

SHOWN = ("loss", "validation_loss")
"""The metrics beside them in TensorBoard's table."""


@component(impact="safe", needs={"tensorboard": "drawloom[tensorboard]"})
class TensorBoardTracker(ServiceTracker):
    """
    Writes `tensorboard` in the run folder, which `tensorboard --logdir RUN_FOLDER` shows.

    The settings of the recipe are its hyperparameters. A resumed run adds a file that purges the steps that it does
    again: TensorBoard then shows one value for each.

    A thread writes, so that a slow disk can neither delay a step nor end the run: steps that are not written in time
    are dropped, with one warning. What a step has measured is in the file as soon as the thread has written it.
    """

    called: ClassVar[str] = "TensorBoard"

    folder: RunFolder

    _writer_class: Any = attrs.field(init=False, default=None)
    _writer: Any = attrs.field(init=False, default=None)

    @property
    def _folder(self) -> Path:
        return self.folder.folder / "tensorboard"

    def _prepare(self) -> None:
        self._writer_class = load_writer()
        make_folder(self._folder)

    def _begin(self, step: int) -> None:
        self._end()
        # an empty folder has nothing to purge
        purged = step + 1 if any(self._folder.glob("events.*")) else None
        self._writer = self._writer_class(str(self._folder), purge_step=purged)
        if self._properties:
            self._write_properties()

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._writer is None:
            self._begin(step - 1)
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()  # TensorBoard's own interval of two minutes would lose steps when the run is killed

    def _write_distributions(self, step: int, distributions: Mapping[str, Histogram]) -> None:
        if self._writer is None:
            self._begin(step - 1)
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

    def _write_properties(self) -> None:
        # The writer's own `add_hparams` would add a run to the folder for each call.
        from torch.utils.tensorboard.summary import hparams

        flat = flat_properties(self._properties)
        plain = {name: value if isinstance(value, PLAIN) else str(value) for name, value in flat.items()}
        for summary in hparams(plain, dict.fromkeys(SHOWN, 0.0)):  # type: ignore[no-untyped-call]
            self._writer.file_writer.add_summary(summary)

    def _end(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


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
