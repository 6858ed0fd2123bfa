"""Metrics in an Aim repository inside the run folder."""

import atexit
import logging
import math
import uuid
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import Job, RunFolder, Value
from drawloom.components.trackers.aim_rewind import forget_after
from drawloom.components.trackers.background import Background
from drawloom.graph import ResolvedRecipe, UserError, above, at_least, component, setting

log = logging.getLogger("drawloom.trackers")


@component(change="free")
class AimTracker:
    """
    `.aim` in the run folder, with one Aim run that a resumed run continues; `aim up --repo RUN_FOLDER` shows it.

    A thread of its own writes, so that Aim can neither delay the run nor end it: what Aim does not take is dropped,
    with one warning. Aim sends nothing anywhere: since 3.29 it has no telemetry, and terminal output, environment and
    system metrics are not recorded.
    """

    folder: RunFolder
    mesh: Mesh
    job: Job
    recipe: ResolvedRecipe
    room: int = setting(default=1000, check=at_least(1), doc="steps that may wait to be written")
    patience: float = setting(default=10.0, check=above(0), doc="seconds to wait for Aim when the run ends")

    _hash: str = attrs.field(init=False, default="")
    _aim: Any = attrs.field(init=False, default=None)
    _run: Any = attrs.field(init=False, default=None)
    _background: Background | None = attrs.field(init=False, default=None)
    _gave_up: bool = attrs.field(init=False, default=False)
    _warned: bool = attrs.field(init=False, default=False)

    def open(self) -> None:
        """Load Aim, on the main rank; a UserError if it is not installed. Nothing is written yet."""
        if self.mesh.world.rank == 0:
            self._aim = load_aim()
            self._hash = _run_in(self._repository) or uuid.uuid4().hex[:24]
            self._background = Background("aim", self.room, self._failed, self._end)

    def close(self) -> None:
        """Write what waits and close the Aim run, unless that takes too long."""
        if self._background is not None:
            if not self._background.close(self.patience):
                self._warn(f"Aim was not done within {self.patience:g} s; some of the last steps are missing there")
                atexit.unregister(self._aim.ext.cleanup.AutoClean.cleanup)  # would wait for Aim without limit
            self._background = None

    def state_dict(self) -> dict[str, Any]:
        """Which Aim run this is; empty on ranks that do not write."""
        return {"run": self._hash}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that Aim run."""
        self._hash = state["run"] or self._hash

    def track(self, step: int, values: Mapping[str, Value]) -> None:
        """Have the finite ones of these values written."""
        numbers = {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
        self._give(partial(self._write, step, numbers))

    def rewind(self, step: int) -> None:
        """Have removed what the Aim run holds of later steps."""
        self._give(partial(self._rewind, step))

    def _give(self, job: Any) -> None:
        if self._background is not None and not self._background.give(job):
            self._warn("Aim does not keep up; some steps will be missing there")

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        if run := self._ready():
            for name, number in numbers.items():
                run.track(number, name=name, step=step)

    def _rewind(self, step: int) -> None:
        if self._chunk.exists() and (run := self._ready()):
            forget_after(run, step)
            self._end()

    def _ready(self) -> Any:
        """The Aim run, opened when it is first needed; None if it can't be."""
        if self._run is None and not self._gave_up:
            self._gave_up = True
            self._run = self._start()
            self._gave_up = False
        return self._run

    def _start(self) -> Any:
        repository = self._aim.Repo.from_path(str(self.folder.folder), init=not (self._repository / "VERSION").exists())
        self._chunk.mkdir(parents=True, exist_ok=True)  # to Aim, a run whose folder is there exists
        # The run folder is ours alone, so a lock was left by a killed process; Aim would trust its process number.
        (self._repository / "locks" / f"{self._hash}.softlock").unlink(missing_ok=True)
        switched_off = {"capture_terminal_logs": False, "log_system_params": False, "system_tracking_interval": None}
        run = self._aim.Run(self._hash, repo=repository, **switched_off)
        run.name = self.job.name
        run["recipe"] = self.recipe.text
        return run

    def _end(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()

    @property
    def _repository(self) -> Path:
        return self.folder.folder / ".aim"

    @property
    def _chunk(self) -> Path:
        return self._repository / "meta" / "chunks" / self._hash

    def _failed(self, error: Exception) -> None:
        what = "nothing is written there" if self._gave_up else "some steps will be missing there"
        self._warn(f"Aim failed, {what}: {type(error).__name__}: {error}")

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s", text)


def _run_in(repository: Path) -> str:
    """The run that a repository holds: a run folder has one, though it be killed before its first checkpoint."""
    chunks = repository / "meta" / "chunks"
    return min((path.name for path in chunks.iterdir()), default="") if chunks.is_dir() else ""


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
