"""The Aim run of a run folder, opened when it is first needed."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drawloom.components.trackers.aim_repository import free_run, has_run, open_repository
from drawloom.components.trackers.aim_rewind import forget_after

RECORD_NOTHING_ELSE = {"capture_terminal_logs": False, "log_system_params": False, "system_tracking_interval": None}


class AimRun:
    """
    All that Aim is asked for, by one thread. Aim may raise anything, and may hang.

    A repository or a run that can't be opened is tried once; from then on `usable` is false and nothing happens.
    """

    def __init__(self, aim: Any, folder: Path, name: str, recipe: str) -> None:
        self.usable = True
        self._aim = aim
        self._folder = folder
        self._name = name
        self._recipe = recipe
        self._repository: Any = None
        self._run: Any = None

    def prepare(self) -> None:
        """Open the repository, and make it if it is missing."""
        with self._once():
            self._repository = open_repository(self._aim, self._folder)

    def rewind(self, run: str, step: int) -> None:
        """Forget what the run of this hash holds of later steps, and open it."""
        if has_run(self._folder, run) and self._opened(run):
            forget_after(self._run, step)
            self.close()
        self._opened(run)

    def track(self, run: str, step: int, numbers: Mapping[str, float]) -> None:
        """Write a step's values into the run of this hash."""
        if self._opened(run):
            for name, number in numbers.items():
                self._run.track(number, name=name, step=step)

    def close(self) -> None:
        """Close the run, so that Aim takes it for ended; it may be opened again."""
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def _opened(self, run: str) -> bool:
        if self._run is None and self.usable:
            with self._once():
                free_run(self._folder, run)
                self._run = self._aim.Run(run, repo=self._repository, **RECORD_NOTHING_ELSE)
                self._run.name = self._name
                self._run["recipe"] = self._recipe
        return self.usable

    @contextmanager
    def _once(self) -> Iterator[None]:
        self.usable = False
        yield
        self.usable = True
