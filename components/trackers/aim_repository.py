"""
Aim repository: atomic creation, and one rewindable run per run folder.

Aim itself only overwrites: tracking a step again replaces its value, but later steps remain. A sequence is stored as
four arrays (value, epoch, time, step), under keys that Aim hashes from the step, and a summary that the next `Run`
object reads.
"""

import tempfile
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import attrs

from drawloom import UserError
from drawloom.components.storage.durable_files import remove_file_or_folder, rename_durably


@attrs.frozen
class AimLocation:
    """
    Repository location: a folder, or a server such as aim://host:port.

    `shared_by` is set for a shared repository: the run folder, which stores its own run's hash.
    """

    address: str
    shared_by: Path | None = None

    @property
    def is_remote(self) -> bool:
        """Whether the repository is on a server."""
        return "://" in self.address

    @property
    def folder(self) -> Path:
        """The repository's folder; only for a repository without a server."""
        return Path(self.address)


def refuse_linked_repository(folder: Path) -> None:
    """Raise UserError if a folder's repository is a symbolic link."""
    path = folder / ".aim"  # the folder may come from a stranger
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link, which may lead anywhere; remove the link, or use another run name")


def open_or_create_aim_repository(aim: Any, location: AimLocation) -> Any:
    """
    Open the repository on a server or in a folder, and create `.aim` in the folder if it is missing.

    Creation takes a second and a subprocess. If it is killed, Aim can't open the partial repository, so the repository
    is created under a temporary name and renamed.
    """
    if location.is_remote:
        return aim.Repo.from_path(location.address)
    folder = location.folder
    if not (folder / ".aim").exists():
        folder.mkdir(parents=True, exist_ok=True)
        # In a shared folder, a temporary repository may belong to another run that is starting.
        for partial in folder.glob(".aim-*") if location.shared_by is None else ():
            with suppress(OSError):
                remove_file_or_folder(partial)
        temporary = Path(tempfile.mkdtemp(prefix=".aim-", dir=folder))
        aim.Repo.from_path(str(temporary), init=True)
        try:
            rename_durably(temporary / ".aim", folder / ".aim")
        except OSError:
            if not (folder / ".aim").exists():
                raise
        remove_file_or_folder(temporary)
    return aim.Repo.from_path(str(folder))


def find_run_hash(folder: Path) -> str:
    """
    Return the repository's run hash; "" if there is no run.

    A run folder has one Aim run, even if the run is killed before its first checkpoint and starts again.
    """
    chunks = _chunks_folder(folder)
    return min((path.name for path in chunks.iterdir()), default="") if chunks.is_dir() else ""


def has_run_with_hash(folder: Path, run_hash: str) -> bool:
    """Return whether the repository contains the run with this hash."""
    return (_chunks_folder(folder) / run_hash).is_dir()


def prepare_run_for_writing(folder: Path, run_hash: str) -> None:
    """
    Prepare a run for writing: create the folder by which Aim finds it, and remove a stale lock.

    This process has locked the run folder, so an Aim lock is left from a killed process. Aim would trust the lock's
    process id, although it may be in use again.
    """
    (_chunks_folder(folder) / run_hash).mkdir(parents=True, exist_ok=True)
    (folder / ".aim" / "locks" / f"{run_hash}.softlock").unlink(missing_ok=True)


def _chunks_folder(folder: Path) -> Path:
    """Return the folder in which Aim keeps one subfolder per run."""
    return folder / ".aim" / "meta" / "chunks"


SYSTEM_PREFIX = "__system__"
"""Prefix of Aim's own measurements, which count their own steps."""


COLUMNS = ("val", "epoch", "time", "step")
NUMBERS_VERSION = 2  # of Aim's layout for series of numbers
OBJECTS_VERSION = 1  # of Aim's layout for series of other values, such as distributions, whose keys are the steps


def delete_steps_after(run: Any, step: int) -> None:
    """Delete all values after a step. The run must be open for writing, and must be closed before tracking."""
    for context, names in run.meta_run_tree.get("traces", {}).items():
        for name in (name for name in names if not name.startswith(SYSTEM_PREFIX)):
            _delete_metric_steps_after(run, (context, name), step)
            _delete_distribution_steps_after(run, (context, name), step)


def _delete_metric_steps_after(run: Any, metric: tuple[int, str], step: int) -> None:
    """Delete a metric's steps after `step`, and steps that a killed process wrote only in part."""
    series = run.series_run_trees[NUMBERS_VERSION].subtree(metric)
    columns = {name: dict(zip(*series.array(name).sparse_list(), strict=True)) for name in COLUMNS}
    complete = set.intersection(*map(set, columns.values()))
    steps = {key: number for key, number in columns["step"].items() if number <= step and key in complete}
    deleted = set().union(*columns.values()) - steps.keys()
    for name, key in product(COLUMNS, deleted):
        del series[name, key]
    if deleted:
        _rewrite_metric_summary(run, metric, {number: columns["val"][key] for key, number in steps.items()})


def _delete_distribution_steps_after(run: Any, metric: tuple[int, str], step: int) -> None:
    """Delete later steps from a distribution series."""
    series = run.series_run_trees[OBJECTS_VERSION].subtree(metric)
    steps = series.array("time").sparse_list()[0]
    for name, key in product(COLUMNS[:-1], [key for key in steps if key > step]):
        del series[name, key]
    if steps:
        run.meta_run_tree[("traces", *metric, "last_step")] = max((key for key in steps if key <= step), default=-1)


def _rewrite_metric_summary(run: Any, metric: tuple[int, str], values: dict[int, float]) -> None:
    """Summarize the remaining values; without values, last_step -1 makes Aim treat the next as the first."""
    summary: dict[str, Any] = {"last_step": -1, "max": float("-inf"), "min": float("inf")}
    if values:
        last = max(values)
        largest, smallest = max(values.values()), min(values.values())
        summary = {"last_step": last, "last": values[last], "max": largest, "min": smallest}
    for name, value in summary.items():
        run.meta_run_tree[("traces", *metric, name)] = value
