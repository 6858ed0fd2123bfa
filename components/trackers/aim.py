"""Metrics in an Aim repository inside the run folder."""

import atexit
import logging
import math
import uuid
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import RunFolder, RunInfo, Value
from drawloom.components.trackers.aim_repository import AimRun, run_in
from drawloom.components.trackers.background import Background, Task
from drawloom.graph import ResolvedRecipe, UserError, above, at_least, component, setting

log = logging.getLogger("drawloom.trackers")


@component(impact="safe", needs={"aim": "drawloom[aim]"})
class AimTracker:
    """
    `.aim` in the run folder, with one Aim run that a resumed run continues; `aim up --repo RUN_FOLDER` shows it.

    A thread of its own writes, so that Aim can neither delay a step nor end the run: what Aim does not take is
    dropped, with one warning. Only before the first step is Aim waited for, for what waits when a process is killed is
    lost. Aim sends nothing anywhere: 3.29 has no telemetry any more, and terminal output, environment and system
    metrics are not recorded.
    """

    folder: RunFolder
    mesh: Mesh
    job: RunInfo
    recipe: ResolvedRecipe
    queue_size: int = setting(default=1000, check=at_least(1), doc="steps that may wait to be written")
    timeout: float = setting(default=10.0, check=above(0), doc="seconds to wait for Aim at start and end")

    _hash: str = attrs.field(init=False, default="")
    _run: AimRun | None = attrs.field(init=False, default=None)
    _background: Background | None = attrs.field(init=False, default=None)
    _warned: bool = attrs.field(init=False, default=False)

    def open(self) -> None:
        """Load Aim and prepare the repository, on the main rank; a UserError if Aim is not installed."""
        if self.mesh.world.rank == 0:
            folder = self.folder.folder
            self._run = AimRun(load_aim(), folder, self.job.name, self.recipe.text)
            self._hash = run_in(folder) or uuid.uuid4().hex[:24]
            self._background = Background("aim", self.queue_size, self._failed, self._run.close)
            self._wait_for(self._run.prepare)

    def close(self) -> None:
        """Write what waits and close the Aim run, unless that takes too long."""
        background, self._background, self._run = self._background, None, None
        if background is not None and not background.close(self.timeout):
            self._warn(f"Aim was not done within {self.timeout:g} s; some of the last steps are missing there")
            atexit.unregister(load_aim().ext.cleanup.AutoClean.cleanup)  # would wait for Aim without limit

    def state_dict(self) -> dict[str, Any]:
        """Which Aim run this is; empty on ranks that do not write."""
        return {"run": self._hash}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that Aim run."""
        self._hash = state["run"] or self._hash

    def rewind(self, step: int) -> None:
        """Open the Aim run, and remove what it holds of later steps."""
        if self._run is not None:
            self._wait_for(partial(self._run.rewind, self._hash, step))

    def track(self, step: int, values: Mapping[str, Value]) -> None:
        """Have the finite ones of these values written."""
        if self._run is None or self._background is None:
            return
        numbers = {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
        if not self._background.give(partial(self._run.track, self._hash, step, numbers)):
            self._warn("Aim does not keep up; some steps will be missing there")

    def _wait_for(self, task: Task) -> None:
        if self._background is not None and not self._background.do(task, self.timeout):
            self._warn(f"Aim was not ready within {self.timeout:g} s; some steps may be missing there")

    def _failed(self, error: Exception) -> None:
        usable = self._run is None or self._run.usable
        what = "some steps will be missing there" if usable else "nothing is written there"
        self._warn(f"Aim failed, {what}: {type(error).__name__}: {error}")

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s", text)


def load_aim() -> Any:
    """The package; a UserError that says what to install if it is missing."""
    try:
        with warnings.catch_warnings():
            # Aim still takes declarative_base from where SQLAlchemy 1 had it.
            warnings.filterwarnings("ignore", r".*declarative_base", DeprecationWarning)
            import aim
            import aim.ext.cleanup
    except ImportError as error:
        raise UserError(
            f"trackers.aim: the package `aim` is missing ({error}); "
            "pip install 'drawloom[aim]' on Python 3.11 or 3.12, or leave this tracker out"
        ) from error
    return aim
