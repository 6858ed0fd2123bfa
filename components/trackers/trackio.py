"""Tracker that writes to Trackio, on this machine or in a Hugging Face Space."""

from collections.abc import Mapping
from typing import Any, ClassVar

from drawloom import component, setting
from drawloom.components.trackers.background import LoggedRunTracker, import_tracker_package
from drawloom.ports import RunInfo

METRICS_ONLY = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}


@component(impact="safe", needs={"trackio": "drawloom[trackio]"})
class TrackioTracker(LoggedRunTracker):
    """
    Trackio tracker: writes to Trackio's own database, which `trackio show --project PROJECT` shows.

    The database is in $TRACKIO_DIR, or in the cache of Hugging Face. A resumed run continues the Trackio run with its
    name. Trackio can't delete steps, so steps that are done again appear twice. Only metrics and the recipe's settings
    are recorded.

    A thread writes, so a disk or the network can't delay a step or end the run. Steps not accepted in time are dropped,
    with one warning.
    """

    called: ClassVar[str] = "Trackio"

    job: RunInfo
    project: str = setting("project name", default="drawloom")
    space: str | None = setting(
        "Hugging Face Space that receives the metrics, as user/name; default: none", default=None
    )

    def _load_package_and_create_files(self) -> None:
        self._package = import_tracker_package("trackio", "trackio")

    def _open_writer_after(self, step: int) -> None:
        if self._run is None:
            target: dict[str, Any] = {"project": self.project, "name": self.job.name, "space_id": self.space}
            self._run = self._package.init(**target, resume="allow", config=dict(self._properties), **METRICS_ONLY)

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step)
