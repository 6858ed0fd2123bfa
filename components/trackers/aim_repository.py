"""
The Aim repository of a run folder: there as a whole or not at all, with one run in it, which can be rewound.

Aim itself only overwrites: tracking a step again replaces its value, but steps that are not tracked again stay. A
sequence is four arrays (value, epoch, time, step) under keys that Aim hashes from the step, and a summary beside them
that the next `Run` object reads.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from drawloom.components.storage.atomic_write import rename


def open_repository(aim: Any, folder: Path) -> Any:
    """
    The repository `.aim` in a folder, made if it is missing.

    To make one takes Aim a second and another process. If it is killed meanwhile, Aim can't open what is left: so it
    is made aside and renamed.
    """
    if not (folder / ".aim").exists():
        for left in folder.glob(".aim-*"):
            shutil.rmtree(left, ignore_errors=True)
        aside = Path(tempfile.mkdtemp(prefix=".aim-", dir=folder))
        aim.Repo.from_path(str(aside), init=True)
        rename(aside / ".aim", folder / ".aim")
        aside.rmdir()
    return aim.Repo.from_path(str(folder))


def run_in(folder: Path) -> str:
    """
    The hash of the run that the repository holds, empty if there is none.

    A run folder has one Aim run, though it be killed before its first checkpoint and start anew.
    """
    chunks = _chunks(folder)
    return min((path.name for path in chunks.iterdir()), default="") if chunks.is_dir() else ""


def has_run(folder: Path, run: str) -> bool:
    """Whether the repository holds the run of this hash."""
    return (_chunks(folder) / run).is_dir()


def free_run(folder: Path, run: str) -> None:
    """
    See to it that the run can be opened for writing: to Aim it exists if its folder does.

    The run folder is ours alone, so a lock was left by a killed process; Aim would trust the number of that process,
    which may be another one's by now.
    """
    (_chunks(folder) / run).mkdir(parents=True, exist_ok=True)
    (folder / ".aim" / "locks" / f"{run}.softlock").unlink(missing_ok=True)


def _chunks(folder: Path) -> Path:
    return folder / ".aim" / "meta" / "chunks"


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


COLUMNS = ("val", "epoch", "time", "step")
NUMBERS = 2  # the version of Aim's layout that it gives to series of numbers


def forget_after(run: Any, step: int) -> None:
    """Remove every metric's values after a step. The run is open for writing; close it before it tracks again."""
    for context, names in run.meta_run_tree.get("traces", {}).items():
        for name in names:
            _cut(run, (context, name), step)


def _cut(run: Any, metric: tuple[int, str], step: int) -> None:
    """Remove later steps, and those that a killed process left with some of their columns only."""
    series = run.series_run_trees[NUMBERS].subtree(metric)
    columns = {name: dict(zip(*series.array(name).sparse_list(), strict=True)) for name in COLUMNS}
    whole = set.intersection(*map(set, columns.values()))
    kept = {key: number for key, number in columns["step"].items() if number <= step and key in whole}
    gone = set().union(*columns.values()) - kept.keys()
    for name, key in product(COLUMNS, gone):
        del series[name, key]
    if gone:
        _summarise(run, metric, {number: columns["val"][key] for key, number in kept.items()})


def _summarise(run: Any, metric: tuple[int, str], values: dict[int, float]) -> None:
    """Say what is left; with a last step of -1 Aim takes the next value for the first."""
    summary: dict[str, Any] = {"last_step": -1, "max": float("-inf"), "min": float("inf")}
    if values:
        last = max(values)
        most, least = max(values.values()), min(values.values())
        summary = {"last_step": last, "last": values[last], "max": most, "min": least}
    for name, value in summary.items():
        run.meta_run_tree[("traces", *metric, name)] = value
