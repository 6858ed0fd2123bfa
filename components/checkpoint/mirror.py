"""Mirror of the run folder in an object store."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import ClassVar

from drawloom import ResolvedRecipe, UserError, above, component, internal, setting
from drawloom.components.checkpoint.manifest import FOLDER, list_checkpoints
from drawloom.components.checkpoint.remote import RemoteCopy
from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.distributed.threads import submit_in_new_thread
from drawloom.components.storage.object_store import ObjectStore, StoreError
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.ports import Event, EventKind, Mesh, RunFolder

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
