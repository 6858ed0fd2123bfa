"""
Tracker that writes to an Aim repository in the run folder, in a shared folder, or on a server.

A repository is created atomically, and holds one rewindable run per run folder. Aim itself only overwrites: tracking a
step again replaces its value, but later steps remain. A sequence is stored as four arrays (value, epoch, time, step),
under keys that Aim hashes from the step, and a summary that the next `Run` object reads.
"""

import atexit
import tempfile
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from drawloom import UserError, above, component, internal, setting
from drawloom.components.storage.durable_files import remove_file_or_folder, rename_durably
from drawloom.components.trackers.background import ServiceTracker, Task, import_tracker_package, select_finite_values
from drawloom.components.trackers.remembered_run import read_stored_run_id, store_run_id
from drawloom.ports import Context, Histogram, MetricValues, NodeState, RunFolder, RunInfo


def refuse_linked_repository(folder: Path) -> None:
    """Raise UserError if a folder's repository is a symbolic link."""
    path = folder / ".aim"  # the folder may come from a stranger
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link, which may lead anywhere; remove the link, or use another run name")


def open_or_create_aim_repository(aim: Any, folder: Path, *, is_shared: bool = False) -> Any:
    """
    Open the repository in a folder, and create `.aim` in the folder if it is missing.

    Creation takes a second and a subprocess. If it is killed, Aim can't open the partial repository, so the repository
    is created under a temporary name and renamed.
    """
    if not (folder / ".aim").exists():
        folder.mkdir(parents=True, exist_ok=True)
        # In a shared folder, a temporary repository may belong to another run that is starting.
        for partial in () if is_shared else folder.glob(".aim-*"):
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


METRICS_ONLY = {"capture_terminal_logs": False, "log_system_params": False}


@component(impact="safe", needs={"aim": "drawloom[aim]"})
class AimTracker(ServiceTracker):
    """
    Aim tracker: writes `.aim` in the run folder, which `aim up --repo RUN_FOLDER` shows, or a shared `repository`.

    A run folder has one Aim run; a resumed run continues it. The recipe's settings are its `hparams`. Values have
    the context `{"phase": "train"}` or `{"phase": "validation"}`; in the latter, `validation_loss` is named `loss`.

    A thread writes, so Aim can't delay a step or end the run. Values not accepted by Aim in time are dropped, with one
    warning. The run waits for Aim only before the first step, because a killed process loses queued values.
    Without a server, Aim sends nothing over the network (3.29 has no telemetry). Terminal output and environment are
    not recorded. CPU, memory and GPU are recorded if `system_metrics` is set.
    """

    called: ClassVar[str] = "Aim"

    folder: RunFolder
    job: RunInfo
    repository: str | None = setting(
        "folder with an .aim that several runs share, or server aim://host:port; default: the run folder", default=None
    )
    experiment: str | None = setting("experiment name; default: Aim's default", default=None)
    system_metrics: float | None = setting(
        "seconds between measurements of CPU, memory and GPU; default: none", default=None, check=above(0)
    )
    timeout: float = setting("seconds to wait for Aim at the start and the end", default=10.0, check=above(0))

    _aim: Any = internal(None)
    _hash: str = internal("")
    _repository: Any = internal(None)
    _run: Any = internal(None)
    _is_usable: bool = internal(True)

    def open(self) -> None:
        """
        Load Aim and prepare the repository on rank 0.

        Raises UserError if Aim is not installed, or if the repository is a link.
        """
        super().open()
        self._run_and_wait_or_warn(self._open_repository)

    def state_dict(self) -> NodeState:
        """Return `run`, the hash of the Aim run; "" on ranks other than 0."""
        return {"run": self._hash}

    def load_state_dict(self, state: NodeState) -> None:
        """Continue the Aim run with the saved hash."""
        self._hash = state["run"] or self._hash

    def rewind(self, step: int) -> None:
        """Open the Aim run, and delete the values of later steps."""
        self._run_and_wait_or_warn(partial(self._open_writer_after, step))

    def track_in_context(self, step: int, values: MetricValues, context: Context) -> None:
        """Queue the finite values of a step for writing."""
        self._queue_task(partial(self._write_values, step, select_finite_values(values), context))

    def _load_package_and_create_files(self) -> None:
        self._aim = import_aim()
        folder = self.folder.folder
        if self.repository is None:
            refuse_linked_repository(folder)
            self._hash = find_run_hash(folder) or uuid.uuid4().hex[:24]
        else:  # before the first run in a shared repository, the hash is unknown
            self._hash = read_stored_run_id(folder, "aim")

    @property
    def _repository_folder(self) -> Path | None:
        """The folder with the repository; None for a server."""
        if self.repository is None:
            return self.folder.folder
        return None if "://" in self.repository else Path(self.repository)

    def _run_and_wait_or_warn(self, task: Task) -> None:
        """Run a task on rank 0 and wait for it up to `timeout` seconds; warn if it takes longer."""
        if self._background is not None and not self._background.run_and_wait(task, self.timeout):
            self._warn(f"Aim was not ready within {self.timeout:g} s; some steps may be missing there")

    def _open_repository(self) -> None:
        with self._mark_unusable_on_error():
            if (folder := self._repository_folder) is None:
                self._repository = self._aim.Repo.from_path(self.repository)
            else:
                is_shared = self.repository is not None
                self._repository = open_or_create_aim_repository(self._aim, folder, is_shared=is_shared)

    def _open_writer_after(self, step: int) -> None:
        exists = (folder := self._repository_folder) is None or has_run_with_hash(folder, self._hash)
        if self._hash and exists and self._open_run_if_usable():
            delete_steps_after(self._run, step)
            self._close_writer()
        self._open_run_if_usable()

    def _write_values(self, step: int, numbers: Mapping[str, float], context: Context | None = None) -> None:
        if self._open_run_if_usable():
            for name, number in numbers.items():
                self._run.track(number, name=name, step=step, context=dict(context or {}))

    def _write_distributions(self, step: int, distributions: Mapping[str, Histogram]) -> None:
        if self._open_run_if_usable():
            for name, histogram in distributions.items():
                bounds = (histogram.low, histogram.high)
                self._run.track(self._aim.Distribution.from_histogram(histogram.counts, bounds), name=name, step=step)

    def _close_writer(self) -> None:
        """Close the run, so Aim marks it as ended; it may be opened again."""
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def _warn_of_timeout(self) -> None:
        super()._warn_of_timeout()
        atexit.unregister(self._aim.ext.cleanup.AutoClean.cleanup)  # it waits for Aim without a timeout

    def _open_run_if_usable(self) -> bool:
        """Open the run unless it is open, and return whether Aim is usable: a failed opening is not repeated."""
        if self._run is None and self._is_usable:
            with self._mark_unusable_on_error():
                self._run = self._open_existing_or_new_run()
                self._run.name = self.job.name
                if self._properties:
                    self._run["hparams"] = dict(self._properties)
        return self._is_usable

    def _open_existing_or_new_run(self) -> Any:
        """
        Open the run with the known hash, or a new run.

        In a shared repository, the hash that the run folder remembers has priority, and a new run's hash is remembered.
        """
        run_hash, folder, is_shared = self._hash, self._repository_folder, self.repository is not None
        if is_shared:
            run_hash = read_stored_run_id(self.folder.folder, "aim") or run_hash
        if run_hash and folder is not None:
            prepare_run_for_writing(folder, run_hash)
        options = {**METRICS_ONLY, "system_tracking_interval": self.system_metrics}
        opened = self._aim.Run(run_hash or None, repo=self._repository, experiment=self.experiment, **options)
        if is_shared and not run_hash:
            store_run_id(self.folder.folder, "aim", opened.hash)
        return opened

    @contextmanager
    def _mark_unusable_on_error(self) -> Iterator[None]:
        """Make later calls do nothing if the context raises."""
        self._is_usable = False
        yield
        self._is_usable = True

    def _describe_loss(self) -> str:
        return super()._describe_loss() if self._is_usable else "nothing is written to it"


def import_aim() -> Any:
    """Return the package `aim`. Raises UserError with the command to install it if it is missing."""
    with warnings.catch_warnings():
        # Aim imports declarative_base from its deprecated location in SQLAlchemy
        warnings.filterwarnings("ignore", r".*declarative_base", DeprecationWarning)
        return import_tracker_package("aim", "aim", "aim.ext.cleanup", remark=" on Python 3.11 or 3.12")
