"""Tracks metrics with Trackio, whose data are on this machine, or in a Space of Hugging Face."""

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from drawloom.components.ports.run import RunInfo
from drawloom.components.ports.tracking import Histogram
from drawloom.components.trackers.background import ServiceTracker
from drawloom.graph import UserError, component, setting

METRICS_ALONE = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}


@component(impact="safe", needs={"trackio": "drawloom[trackio]"})
class TrackioTracker(ServiceTracker):
    """
    Writes a run of Trackio into its own database, which `trackio show --project PROJECT` shows.

    The database is where Trackio keeps it: $TRACKIO_DIR, or Hugging Face's cache. A resumed run continues the run of
    its name. Trackio deletes nothing, so steps that are done again are there twice. Nothing but metrics and the
    settings of the recipe is recorded.

    A thread writes, so that neither a disk nor the network can delay a step or end the run: steps that are not accepted
    in time are dropped, with one warning.
    """

    called: ClassVar[str] = "Trackio"

    job: RunInfo
    project: str = setting(default="drawloom", doc="the project that the run is in")
    space: str | None = setting(
        default=None, doc="a Space of Hugging Face to send metrics to, as user/name; none if left out"
    )

    _trackio: Any = attrs.field(init=False, default=None)
    _run: Any = attrs.field(init=False, default=None)

    def _prepare(self) -> None:
        self._trackio = load_trackio()

    def _begin(self, step: int) -> None:
        if self._run is None:
            where: dict[str, Any] = {"project": self.project, "name": self.job.name, "space_id": self.space}
            self._run = self._trackio.init(**where, resume="allow", config=dict(self._properties), **METRICS_ALONE)

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._begin(step - 1)
        self._run.log(dict(numbers), step=step)

    def _write_distributions(self, step: int, distributions: Mapping[str, Histogram]) -> None:
        self._begin(step - 1)
        drawn = {
            name: self._trackio.Histogram(np_histogram=(histogram.counts, histogram.edges))
            for name, histogram in distributions.items()
        }
        self._run.log(drawn, step=step)

    def _end(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()


def load_trackio() -> Any:
    """The package `trackio`. Raises UserError, with what to install, if it is missing."""
    try:
        import trackio
    except ImportError as error:
        raise UserError(
            f"trackers.trackio: the package `trackio` is missing ({error}); "
            "pip install 'drawloom[trackio]', or remove this tracker"
        ) from error
    return trackio
