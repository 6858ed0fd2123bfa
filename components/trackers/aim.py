"""Tracker that writes to an Aim repository in the run folder, in a shared folder, or on a server."""

import atexit
import uuid
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import RunFolder, RunInfo
from drawloom.components.ports.tracking import Context, Histogram, Value
from drawloom.components.trackers.aim_repository import AimLocation, AimRun, find_run_hash, refuse_linked_repository
from drawloom.components.trackers.background import Background, OneWarning, Task, select_finite_values
from drawloom.components.trackers.remembered_run import read_stored_run_id
from drawloom.graph import UserError, above, at_least, component, setting


@component(impact="safe", needs={"aim": "drawloom[aim]"})
class AimTracker:
    """
    Aim tracker: writes `.aim` in the run folder, which `aim up --repo RUN_FOLDER` shows, or a shared `repository`.

    A run folder has one Aim run; a resumed run continues it. The recipe's settings are its `hparams`. Values have
    the context `{"phase": "train"}` or `{"phase": "validation"}`; in the latter, `validation_loss` is named `loss`.

    A thread writes, so Aim can't delay a step or end the run. Values not accepted by Aim in time are dropped, with one
    warning. The run waits for Aim only before the first step, because a killed process loses queued values.
    Without a server, Aim sends nothing over the network (3.29 has no telemetry). Terminal output and environment are
    not recorded. CPU, memory and GPU are recorded if `system_metrics` is set.
    """

    folder: RunFolder
    mesh: Mesh
    job: RunInfo
    repository: str | None = setting(
        default=None,
        doc="folder with an .aim that several runs share, or server aim://host:port; default: the run folder",
    )
    experiment: str | None = setting(default=None, doc="experiment name; default: Aim's default")
    system_metrics: float | None = setting(
        default=None, check=above(0), doc="seconds between measurements of CPU, memory and GPU; default: none"
    )
    queue_size: int = setting(default=1000, check=at_least(1), doc="maximum number of steps queued for writing")
    timeout: float = setting(default=10.0, check=above(0), doc="seconds to wait for Aim at the start and the end")

    _hash: str = attrs.field(init=False, default="")
    _properties: Mapping[str, Any] = attrs.field(init=False, factory=dict)
    _run: AimRun | None = attrs.field(init=False, default=None)
    _background: Background | None = attrs.field(init=False, default=None)
    _warn: OneWarning = attrs.field(init=False, factory=OneWarning)

    def open(self) -> None:
        """
        Load Aim and prepare the repository on rank 0.

        Raises UserError if Aim is not installed, or if the repository is a link.
        """
        if self.mesh.world.rank == 0:
            self._run = AimRun(
                import_aim(), self._locate_repository(), self.job.name, self.experiment, self.system_metrics
            )
            self._hash = self._recall_or_make_run_hash()
            self._background = Background("aim", self.queue_size, self._warn_of_error, self._run.close)
            self._run_and_wait_or_warn(self._run.open_or_create_repository)

    def close(self) -> None:
        """Write queued values and close the Aim run, within `timeout` seconds."""
        background, self._background, self._run = self._background, None, None
        if background is not None and not background.finish_tasks(self.timeout):
            self._warn(f"Aim was not done within {self.timeout:g} s; some of the last steps are missing there")
            atexit.unregister(import_aim().ext.cleanup.AutoClean.cleanup)  # it waits for Aim without a timeout

    def state_dict(self) -> dict[str, Any]:
        """Return `run`, the hash of the Aim run; "" on ranks other than 0."""
        return {"run": self._hash}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the Aim run with the saved hash."""
        self._hash = state["run"] or self._hash

    def store_properties(self, properties: Mapping[str, Any]) -> None:
        """Store the properties for the Aim run, which `rewind` opens."""
        self._properties = properties

    def rewind(self, step: int) -> None:
        """Open the Aim run, and delete the values of later steps."""
        if self._run is not None:
            self._run.properties = self._properties
            self._run_and_wait_or_warn(partial(self._run.rewind, self._hash, step))

    def track(self, step: int, values: Mapping[str, Value]) -> None:
        """Queue the finite values of a step for writing, without a context."""
        self.track_in_context(step, values, {})

    def track_in_context(self, step: int, values: Mapping[str, Value], context: Context) -> None:
        """Queue the finite values of a step for writing."""
        if self._run is not None:
            self._queue_task(partial(self._run.track, self._hash, step, select_finite_values(values), context))

    def track_distributions(self, step: int, distributions: Mapping[str, Histogram]) -> None:
        """Queue the histograms of a step for writing."""
        if self._run is not None:
            self._queue_task(partial(self._run.track_distributions, self._hash, step, distributions))

    def _locate_repository(self) -> "AimLocation":
        """Return the repository's location. Raises UserError if it is a link in the run folder."""
        if self.repository is None:
            refuse_linked_repository(self.folder.folder)
            return AimLocation(str(self.folder.folder))
        return AimLocation(self.repository, shared_by=self.folder.folder)

    def _recall_or_make_run_hash(self) -> str:
        """Return the run folder's Aim run hash, or a new one; in a shared repository, "" before the first run."""
        folder = self.folder.folder
        return read_stored_run_id(folder, "aim") if self.repository else find_run_hash(folder) or uuid.uuid4().hex[:24]

    def _queue_task(self, task: Task) -> None:
        """Queue a task on rank 0; warn if the queue is full."""
        if self._background is not None and not self._background.try_to_queue(task):
            self._warn("Aim does not keep up; some steps will be missing there")

    def _run_and_wait_or_warn(self, task: Task) -> None:
        """Run a task on rank 0 and wait for it up to `timeout` seconds; warn if it takes longer."""
        if self._background is not None and not self._background.run_and_wait(task, self.timeout):
            self._warn(f"Aim was not ready within {self.timeout:g} s; some steps may be missing there")

    def _warn_of_error(self, error: Exception) -> None:
        """Warn about Aim's exception, and say if later values are lost, too."""
        is_usable = self._run is None or self._run.usable
        effect = "some steps will be missing there" if is_usable else "nothing is written to it"
        self._warn(f"Aim failed, {effect}: {type(error).__name__}: {error}")


def import_aim() -> Any:
    """Return the package `aim`. Raises UserError with the command to install it if it is missing."""
    try:
        with warnings.catch_warnings():
            # Aim imports declarative_base from its deprecated location in SQLAlchemy
            warnings.filterwarnings("ignore", r".*declarative_base", DeprecationWarning)
            import aim
            import aim.ext.cleanup
    except ImportError as error:
        raise UserError(
            f"trackers.aim: the package `aim` is missing ({error}); "
            "pip install 'drawloom[aim]' on Python 3.11 or 3.12, or remove this tracker"
        ) from error
    return aim
