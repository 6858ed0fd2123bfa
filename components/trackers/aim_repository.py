"""
The Aim repository of a run folder or of several: created atomically, with one run of the folder, which can be rewound.

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

import attrs

from drawloom.components.ports.tracking import Histogram
from drawloom.components.storage.durable_files import remove_folder, rename
from drawloom.components.trackers.remembered_run import remember_run, remembered_run
from drawloom.graph import UserError


@attrs.frozen
class AimLocation:
    """
    Where a repository is: a folder, or a server such as aim://host:port.

    `shared_by` is the run folder that shares the repository with others, and remembers which of its runs is its own.
    """

    address: str
    shared_by: Path | None = None

    @property
    def is_remote(self) -> bool:
        """Whether it is a server."""
        return "://" in self.address

    @property
    def folder(self) -> Path:
        """The folder with the repository, which is not on a server."""
        return Path(self.address)


def refuse_link(folder: Path) -> None:
    """Raise UserError if the repository of a folder, which a stranger may have sent, is a symbolic link."""
    path = folder / ".aim"
    if path.is_symlink():
        text = "it is a symbolic link, which may lead anywhere"
        raise UserError(f"{path} can't be written to ({text}); remove it, or use another run name")


def open_repository(aim: Any, location: AimLocation) -> Any:
    """
    Open the repository of a server, or `.aim` in a folder, where it is created if it is missing.

    Creating one takes Aim a second and a subprocess. Aim can't open a partial one that a kill leaves, so it is created
    under a temporary name and renamed.
    """
    if location.is_remote:
        return aim.Repo.from_path(location.address)
    folder = location.folder
    if not (folder / ".aim").exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Of a shared folder, another run may be creating it.
        for left in folder.glob(".aim-*") if location.shared_by is None else ():
            with suppress(OSError):
                remove_folder(left)
        temporary = Path(tempfile.mkdtemp(prefix=".aim-", dir=folder))
        aim.Repo.from_path(str(temporary), init=True)
        try:
            rename(temporary / ".aim", folder / ".aim")
        except OSError:
            if not (folder / ".aim").exists():
                raise
        remove_folder(temporary)
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


RECORD_NOTHING_ELSE = {"capture_terminal_logs": False, "log_system_params": False}

SYSTEM = "__system__"
"""Begins the names of Aim's own measurements, whose steps are not the run's."""


class AimRun:
    """
    The calls to Aim, made by one thread. Aim may raise any exception, and may hang.

    Opening a repository or a run is tried once; if it fails, `usable` is false and later calls do nothing.
    """

    def __init__(
        self,
        aim: Any,
        location: AimLocation,
        name: str,
        experiment: str | None = None,
        system_metrics: float | None = None,
    ) -> None:
        self.usable = True
        self.properties: Mapping[str, Any] = {}
        self._aim = aim
        self._location = location
        self._name = name
        self._experiment = experiment
        self._system_metrics = system_metrics
        self._repository: Any = None
        self._run: Any = None

    def prepare(self) -> None:
        """Open the repository, or create it if it is missing."""
        with self._marked_unusable():
            self._repository = open_repository(self._aim, self._location)

    def rewind(self, run: str, step: int) -> None:
        """Delete the later steps of the run of this hash, and open it."""
        exists = self._location.is_remote or has_run(self._location.folder, run)
        if run and exists and self._opened(run):
            delete_after(self._run, step)
            self.close()
        self._opened(run)

    def track(self, run: str, step: int, numbers: Mapping[str, float], context: Mapping[str, str]) -> None:
        """Write a step's values to the run of this hash."""
        if self._opened(run):
            for name, number in numbers.items():
                self._run.track(number, name=name, step=step, context=dict(context))

    def track_distributions(self, run: str, step: int, distributions: Mapping[str, Histogram]) -> None:
        """Write a step's histograms to the run of this hash."""
        if self._opened(run):
            for name, histogram in distributions.items():
                bounds = (histogram.low, histogram.high)
                drawn = self._aim.Distribution.from_histogram(histogram.counts, bounds)
                self._run.track(drawn, name=name, step=step)

    def close(self) -> None:
        """Close the run, so that Aim marks it as ended; it may be opened again."""
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def _opened(self, run: str) -> bool:
        if self._run is None and self.usable:
            with self._marked_unusable():
                self._run = self._open_run(run)
                self._run.name = self._name
                if self.properties:
                    self._run["hparams"] = dict(self.properties)
        return self.usable

    def _open_run(self, run: str) -> Any:
        """Open the run of this hash; in a shared repository, the one that the run folder remembers, or a new one."""
        shared_by = self._location.shared_by
        if shared_by is not None:
            run = remembered_run(shared_by, "aim") or run
        if run and not self._location.is_remote:
            free_run(self._location.folder, run)
        options = {**RECORD_NOTHING_ELSE, "system_tracking_interval": self._system_metrics}
        opened = self._aim.Run(run or None, repo=self._repository, experiment=self._experiment, **options)
        if shared_by is not None and not run:
            remember_run(shared_by, "aim", opened.hash)
        return opened

    @contextmanager
    def _marked_unusable(self) -> Iterator[None]:
        self.usable = False
        yield
        self.usable = True


COLUMNS = ("val", "epoch", "time", "step")
NUMBERS = 2  # the version of Aim's layout for series of numbers
OBJECTS = 1  # and for series of other values, such as distributions, whose keys are the steps


def delete_after(run: Any, step: int) -> None:
    """Delete every metric's values after a step. The run must be open for writing, and be closed before tracking."""
    for context, names in run.meta_run_tree.get("traces", {}).items():
        for name in (name for name in names if not name.startswith(SYSTEM)):
            _truncate(run, (context, name), step)
            _truncate_objects(run, (context, name), step)


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


def _truncate_objects(run: Any, metric: tuple[int, str], step: int) -> None:
    """Delete later steps of a series of distributions."""
    series = run.series_run_trees[OBJECTS].subtree(metric)
    steps = series.array("time").sparse_list()[0]
    for name, key in product(COLUMNS[:-1], [key for key in steps if key > step]):
        del series[name, key]
    if steps:
        run.meta_run_tree[("traces", *metric, "last_step")] = max((key for key in steps if key <= step), default=-1)


def _write_summary(run: Any, metric: tuple[int, str], values: dict[int, float]) -> None:
    """Write the summary of the remaining values; without any, last_step -1 makes Aim treat the next as the first."""
    summary: dict[str, Any] = {"last_step": -1, "max": float("-inf"), "min": float("inf")}
    if values:
        last = max(values)
        most, least = max(values.values()), min(values.values())
        summary = {"last_step": last, "last": values[last], "max": most, "min": least}
    for name, value in summary.items():
        run.meta_run_tree[("traces", *metric, name)] = value
