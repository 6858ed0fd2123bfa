"""Mirror of the run folder in an object store: checkpoints with their manifests last, metrics, recipe and report."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import ClassVar

import attrs

from drawloom import ResolvedRecipe, UserError, above, component, internal, setting
from drawloom.components.checkpoint.commit import (
    FOLDER,
    MANIFEST,
    STEP,
    CorruptCheckpointError,
    list_checkpoints,
    step_of_checkpoint,
)
from drawloom.components.checkpoint.reader import read_manifest_if_sizes_match, verify_checkpoint
from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.distributed.threads import submit_in_new_thread
from drawloom.components.storage.object_store import ObjectStore, StoreError
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.ports import Event, EventKind, Mesh, RunFolder

SMALL_FILES = (LOCK, "metrics.jsonl", "sample.txt", "report.html", "log/environment.json")
"""Files that are copied when they have changed."""
NEEDED_FILES = (LOCK, "metrics.jsonl")
"""Files that a resumed run reads beside the checkpoint."""

Stamp = tuple[int, int]


@attrs.define
class RemoteCopy:
    """Copy of one run folder; `upload_changes_and_prune` brings it up to date, and `fetch_checkpoint` reads it."""

    store: ObjectStore
    _stamps: dict[str, Stamp] = attrs.field(factory=dict)
    _copied: set[str] = attrs.field(factory=set)

    def is_behind(self, run: Path) -> bool:
        """Return whether a checkpoint of the run is not copied; reads no file and asks no store."""
        return any(path.name not in self._copied for path in list_checkpoints(run / FOLDER))

    def upload_changes_and_prune(self, run: Path) -> None:
        """
        Copy new checkpoints and changed files, and remove checkpoints no longer in the run.

        A checkpoint's manifest is written last and removed first, so a checkpoint with a manifest is whole. Raises
        StoreError if the store fails; a later call goes on.
        """
        remote = {name for name in self.store.list_names(FOLDER) if STEP.fullmatch(name)}
        whole = {
            name for name in remote if name in self._copied or MANIFEST in self.store.list_names(f"{FOLDER}/{name}")
        }
        self._copied = whole
        for checkpoint in list_checkpoints(run / FOLDER):
            if checkpoint.name not in whole:
                self._upload_checkpoint(checkpoint)
        for name in SMALL_FILES:
            self._upload_if_modified(run / name, name)
        local = {path.name for path in list_checkpoints(run / FOLDER)}
        for name in remote - local if local else ():
            self.store.remove(f"{FOLDER}/{name}/{MANIFEST}")
            self.store.remove(f"{FOLDER}/{name}")
            self._copied.discard(name)

    def fetch_checkpoint(self, run: Path, step: int | None = None) -> int:
        """
        Copy the newest whole checkpoint, or a step's, into a run folder, and return its step; 0 without one.

        The copy is verified by the digests of its manifest; a damaged one is skipped. Raises StoreError if the store
        fails, and UserError if all checkpoints are damaged.
        """
        names = sorted(
            filter(STEP.fullmatch, self.store.list_names(FOLDER)), key=lambda name: step_of_checkpoint(Path(name))
        )
        faults: Mapping[str, str] = {}
        for name in reversed(names):
            if step in (None, step_of_checkpoint(Path(name))) and MANIFEST in self.store.list_names(f"{FOLDER}/{name}"):
                if not (fault := self._download_checkpoint_and_find_fault(run, name)):
                    for file in NEEDED_FILES:
                        if file in self.store.list_names():
                            self.store.download(file, run / file)
                    return step_of_checkpoint(Path(name))
                faults = {**faults, name: fault}
        if faults:
            listed = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
            raise UserError(f"{self.store.url} has only damaged checkpoints: {listed}")
        return 0

    def _upload_checkpoint(self, checkpoint: Path) -> None:
        manifest = read_manifest_if_sizes_match(checkpoint)
        if manifest is None:
            return  # corrupt, or just removed
        try:
            for name in (*manifest.files, MANIFEST):
                self.store.upload(checkpoint / name, f"{FOLDER}/{checkpoint.name}/{name}")
        except FileNotFoundError:  # the run has removed the checkpoint meanwhile
            self.store.remove(f"{FOLDER}/{checkpoint.name}")
            return
        self._copied.add(checkpoint.name)

    def _upload_if_modified(self, file: Path, name: str) -> None:
        try:
            status = file.stat()
            stamp = status.st_mtime_ns, status.st_size
            if self._stamps.get(name) != stamp:
                self.store.upload(file, name)
                self._stamps[name] = stamp
        except FileNotFoundError:
            return

    def _download_checkpoint_and_find_fault(self, run: Path, name: str) -> str:
        """Download and verify a checkpoint, and return its fault; a damaged copy is removed."""
        temporary = run / FOLDER / f".tmp-{name}" / name  # the run removes leftovers of this name
        for file in self.store.list_names(f"{FOLDER}/{name}"):
            self.store.download(f"{FOLDER}/{name}/{file}", temporary / file)
        try:
            verify_checkpoint(temporary)
        except CorruptCheckpointError as error:
            return str(error)
        temporary.rename(run / FOLDER / name)
        temporary.parent.rmdir()
        return ""


def fetch_run(url: str, folder: Path, step: int | None = None) -> None:
    """Copy a run from a store into an empty folder. Raises UserError if the store fails or has no such checkpoint."""
    try:
        fetched_step = RemoteCopy(ObjectStore.open(url)).fetch_checkpoint(folder, step)
    except StoreError as error:
        raise UserError(f"{error}; check the URL and the credentials of the store", 2) from error
    if not fetched_step:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise UserError(f"{url} has {which}; give the mirror of a run", 2)


log = logging.getLogger("drawloom.checkpoint")


@component(impact="safe")
class Mirror:
    """
    Copies of checkpoints, metrics and report in an object store, such as s3://bucket/runs/first_run.

    A background thread of rank 0 copies every committed checkpoint, its manifest last. The local folder stays the
    truth: a failing store is only a warning, and a later copy goes on. A run whose folder has no checkpoint continues
    from the newest one in the mirror, verified by its digests.
    """

    observes: ClassVar[tuple[EventKind, ...]] = ("step_ended", "run_ended")

    folder: RunFolder
    mesh: Mesh
    recipe: ResolvedRecipe
    url: str = setting("folder in the store, by a protocol of fsspec; one per run")
    every: float = setting("seconds between copies of the metrics", default=60.0, check=above(0))
    timeout: float = setting("seconds that the end of the run waits for copies", default=600.0, check=above(0))

    clock: Callable[[], float] = internal(time.monotonic)
    _copy: RemoteCopy | None = internal(None)
    _pending: Future[None] | None = internal(None)
    _last: float = internal(0.0)
    _has_warned: bool = internal(False)

    def open(self) -> None:
        """Read the newest checkpoint of the mirror into a folder without one. Raises UserError for another recipe."""
        run_on_rank0(self.mesh.world, self._fetch_newest_if_none)

    def on_event(self, event: Event) -> None:
        """Start a copy if there is something new; at the end of the run, wait until all is copied."""
        if self._copy is None:
            return
        if event.kind == "run_ended":
            self._wait_for_upload_or_warn()
            self._start_upload_and_prune()
            self._wait_for_upload_or_warn()
        elif self._pending is None or self._pending.done():
            self._log_failure_unless_repeated()
            if self.clock() - self._last >= self.every or self._copy.is_behind(self.folder.folder):
                self._start_upload_and_prune()

    def close(self) -> None:
        """Wait up to `timeout` for the current copy, if there is one."""
        self._wait_for_upload_or_warn()
        self._copy = None

    def _fetch_newest_if_none(self) -> None:
        """Connect to the store, and fetch its newest checkpoint if the run folder has none."""
        self._copy = RemoteCopy(ObjectStore.open(self.url))
        run = self.folder.folder
        if list_checkpoints(run / FOLDER):
            return
        try:
            step = self._copy.fetch_checkpoint(run)
        except StoreError as error:
            raise UserError(f"url: {error}; check the URL and the credentials, or remove [listeners.mirror]") from error
        if step:
            recorded = (run / LOCK).read_text("utf-8")
            changes = [change for change in self.recipe.changes(recorded) if change.impact != "safe"]
            if changes and not self.recipe.accept_changes:
                lines = "\n".join(f"  {change}" for change in changes)
                hint = "use another url, or add --accept-changes"
                raise UserError(
                    f"url: {self.url} holds a run of another recipe; {hint}; the differences are:\n{lines}", 2
                )
            log.info("%s: the checkpoint of step %d comes from %s", run, step, self.url)

    def _start_upload_and_prune(self) -> None:
        """Copy new files to the store, and remove its expired checkpoints, in a background thread."""
        copy, run = self._copy, self.folder.folder
        self._last = self.clock()
        if copy is not None:
            self._pending = submit_in_new_thread("mirror", lambda: copy.upload_changes_and_prune(run))

    def _wait_for_upload_or_warn(self) -> None:
        """Wait up to `timeout` for the current copy, if any, and warn if it is not complete."""
        if self._pending is not None:
            wait([self._pending], self.timeout)
            if not self._pending.done():
                log.warning("%s: the copy is not complete after %g s; the next start goes on", self.url, self.timeout)
            self._log_failure_unless_repeated()

    def _log_failure_unless_repeated(self) -> None:
        """Log why an ended copy failed, unless the copy before failed, too."""
        if self._pending is None or not self._pending.done():
            return
        error = self._pending.exception()
        self._pending = None
        if error is not None and not self._has_warned:
            log.warning("the mirror is behind, and the run continues: %s", error)
        self._has_warned = error is not None
