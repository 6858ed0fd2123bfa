"""
The Aim repository of a run folder: created atomically, with one run in it, which can be rewound.

Aim itself only overwrites: tracking a step again replaces its value, but steps that are not tracked again are kept. A
sequence is four arrays (value, epoch, time, step) under keys that Aim hashes from the step, and a summary that the next
`Run` object reads.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

from drawloom.components.storage.durable_files import remove_folder, rename
from drawloom.graph import UserError


def refuse_link(folder: Path) -> None:
    """Raise UserError if the repository of a folder, which a stranger may have sent, is a symbolic link."""
    path = folder / ".aim"
    if path.is_symlink():
        text = "it is a symbolic link, which may lead anywhere"
        raise UserError(f"{path} can't be written to ({text}); remove it, or use another run name")


def open_repository(aim: Any, folder: Path) -> Any:
    """
    Open the repository `.aim` in a folder; it is created if it is missing.

    Creating one takes Aim a second and a subprocess. Aim can't open a partial one that a kill leaves, so it is created
    under a temporary name and renamed.
    """
    if not (folder / ".aim").exists():
        for left in folder.glob(".aim-*"):
            with suppress(OSError):
                remove_folder(left)
        temporary = Path(tempfile.mkdtemp(prefix=".aim-", dir=folder))
        aim.Repo.from_path(str(temporary), init=True)
        rename(temporary / ".aim", folder / ".aim")
        temporary.rmdir()
    return aim.Repo.from_path(str(folder))


def run_in(folder: Path) -> str:
    """
    The hash of the repository's run, empty if there is none.

    A run folder has one Aim run, even if the run is killed before its first checkpoint and starts again.
    """
    chunks = _chunks(folder)
    return min((path.name for path in chunks.iterdir()), default="") if chunks.is_dir() else ""


def has_run(folder: Path, run: str) -> bool:
    """Whether the repository contains the run of this hash."""
    return (_chunks(folder) / run).is_dir()


def free_run(folder: Path, run: str) -> None:
    """
    Make a run ready to be opened for writing: create its folder, by which Aim knows it, and remove a stale lock.

    The run folder is locked by this process, so an Aim lock is that of a killed process; Aim would trust its process
    id, which may be in use again.
    """
    (_chunks(folder) / run).mkdir(parents=True, exist_ok=True)
    (folder / ".aim" / "locks" / f"{run}.softlock").unlink(missing_ok=True)


def _chunks(folder: Path) -> Path:
    return folder / ".aim" / "meta" / "chunks"


RECORD_NOTHING_ELSE = {"capture_terminal_logs": False, "log_system_params": False, "system_tracking_interval": None}


class AimRun:
    """
    The calls to Aim, made by one thread. Aim may raise any exception, and may hang.

    Opening a repository or a run is tried once; if it fails, `usable` is false and later calls do nothing.
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
        """Open the repository, or create it if it is missing."""
        with self._marked_unusable():
            self._repository = open_repository(self._aim, self._folder)

    def rewind(self, run: str, step: int) -> None:
        """Delete the later steps of the run of this hash, and open it."""
        if has_run(self._folder, run) and self._opened(run):
            delete_after(self._run, step)
            self.close()
        self._opened(run)

    def track(self, run: str, step: int, numbers: Mapping[str, float]) -> None:
        """Write a step's values to the run of this hash."""
        if self._opened(run):
            for name, number in numbers.items():
                self._run.track(number, name=name, step=step)

    def close(self) -> None:
        """Close the run, so that Aim marks it as ended; it may be opened again."""
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def _opened(self, run: str) -> bool:
        if self._run is None and self.usable:
            with self._marked_unusable():
                free_run(self._folder, run)
                self._run = self._aim.Run(run, repo=self._repository, **RECORD_NOTHING_ELSE)
                self._run.name = self._name
                self._run["recipe"] = self._recipe
        return self.usable

    @contextmanager
    def _marked_unusable(self) -> Iterator[None]:
        self.usable = False
        yield
        self.usable = True


COLUMNS = ("val", "epoch", "time", "step")
NUMBERS = 2  # the version of Aim's layout for series of numbers


def delete_after(run: Any, step: int) -> None:
    """Delete every metric's values after a step. The run must be open for writing, and be closed before tracking."""
    for context, names in run.meta_run_tree.get("traces", {}).items():
        for name in names:
            _truncate(run, (context, name), step)


def _truncate(run: Any, metric: tuple[int, str], step: int) -> None:
    """Delete later steps, and those that a killed process wrote only some columns of."""
    series = run.series_run_trees[NUMBERS].subtree(metric)
    columns = {name: dict(zip(*series.array(name).sparse_list(), strict=True)) for name in COLUMNS}
    complete = set.intersection(*map(set, columns.values()))
    kept = {key: number for key, number in columns["step"].items() if number <= step and key in complete}
    deleted = set().union(*columns.values()) - kept.keys()
    for name, key in product(COLUMNS, deleted):
        del series[name, key]
    if deleted:
        _write_summary(run, metric, {number: columns["val"][key] for key, number in kept.items()})


def _write_summary(run: Any, metric: tuple[int, str], values: dict[int, float]) -> None:
    """Write the summary of the remaining values; without any, last_step -1 makes Aim treat the next as the first."""
    summary: dict[str, Any] = {"last_step": -1, "max": float("-inf"), "min": float("inf")}
    if values:
        last = max(values)
        most, least = max(values.values()), min(values.values())
        summary = {"last_step": last, "last": values[last], "max": most, "min": least}
    for name, value in summary.items():
        run.meta_run_tree[("traces", *metric, name)] = value
