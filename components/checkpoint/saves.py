"""A run's saves: snapshot, staging, background write, commit, and removal of expired checkpoints."""

import errno
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from functools import cached_property
from pathlib import Path
from typing import Literal

import attrs
import torch

from drawloom import ResolvedRecipe, UserError, internal
from drawloom.components.checkpoint import commit
from drawloom.components.checkpoint.commit import CorruptCheckpointError, list_checkpoints, step_of_checkpoint
from drawloom.components.checkpoint.snapshot import ShardPlan, Snapshot
from drawloom.components.distributed.rank_errors import RankError, run_and_gather_on_all_ranks, run_on_rank0
from drawloom.components.distributed.threads import submit_in_new_thread
from drawloom.components.storage import durable_files
from drawloom.components.storage.byte_size import format_decimal_byte_size
from drawloom.ports import Durable, Group, GrowingState, Stager, Stateful, Step, run_log

Values = Mapping[str, float | None]
"""Metrics of a step; None for a value that is not finite."""


@attrs.define(eq=False)
class Retention:
    """
    Finder for expired checkpoints: keeps the newest `keep`, multiples of `every`, and the lowest or highest `best`.

    A corrupt checkpoint neither counts nor expires: a checkpoint expires only if this process has committed or
    verified its newer or better replacements.
    """

    keep: int
    every: int | None = None
    best: str | None = None
    best_is: Literal["lowest", "highest"] = "lowest"
    _valid: dict[Path, Values] = internal(factory=dict)
    _corrupt: set[Path] = internal(factory=set)

    def steps_to_keep_for_now(self, candidates: Mapping[int, Values]) -> set[int]:
        """
        Return the steps to keep until better or newer ones exist: the newest, the best (the newest among equals), and
        the newest with a finite loss.

        All must be verified: in exchange for a corrupt checkpoint, a valid one would be removed.
        """
        steps = sorted(candidates)
        finite = [step for step in steps if candidates[step].get("loss", 0.0) is not None]
        sign = -1 if self.best_is == "lowest" else 1
        numbers = {step: None if self.best is None else values.get(self.best) for step, values in candidates.items()}
        known = [(sign * number, step) for step, number in numbers.items() if number is not None]
        return {*steps[-self.keep :], *finite[-1:], *([max(known)[1]] if known else [])}

    def remember_as_valid(self, checkpoint: Path, values: Values) -> None:
        """Record a valid checkpoint."""
        self._valid[checkpoint] = values
        self._corrupt.discard(checkpoint)

    def remember_as_corrupt(self, checkpoint: Path) -> None:
        """Record a corrupt checkpoint."""
        self._corrupt.add(checkpoint)
        self._valid.pop(checkpoint, None)

    def verify_and_select_expired(self, checkpoints: Path, saved: Path) -> list[Path]:
        """Return the expired checkpoints up to the newest save, oldest first."""
        while True:
            values = self._list_candidates(checkpoints, saved)
            temporary = self.steps_to_keep_for_now(values)
            expendable = [step for step in values if self.every is None or step % self.every]
            expired = [checkpoints / f"step-{step}" for step in expendable if step not in temporary]
            replacements = [checkpoints / f"step-{step}" for step in values if step in temporary]
            unverified = [path for path in replacements if path not in self._valid]
            if not expired or not unverified:
                return expired
            # verifying reads whole checkpoints, so it is done only before a removal
            from drawloom.components.checkpoint.reader import verify_checkpoint

            for path in unverified:
                try:
                    self.remember_as_valid(path, verify_checkpoint(path).values)
                except CorruptCheckpointError as error:
                    log.warning("%s is corrupt, and not counted among those that are kept: %s", path, error)
                    self.remember_as_corrupt(path)

    def _list_candidates(self, checkpoints: Path, saved: Path) -> dict[int, Values]:
        """Return the metrics by step in checkpoints up to `saved`, except corrupt or incomplete ones."""
        candidates: dict[int, Values] = {}
        for path in list_checkpoints(checkpoints):
            if path in self._valid:
                candidates[step_of_checkpoint(path)] = self._valid[path]
            elif path not in self._corrupt:
                from drawloom.components.checkpoint.reader import read_manifest_if_sizes_match

                if manifest := read_manifest_if_sizes_match(path):
                    candidates[step_of_checkpoint(path)] = manifest.values
        return {step: values for step, values in candidates.items() if step <= step_of_checkpoint(saved)}


CLOSE_TIMEOUT = 20.0  # seconds that a failing run waits for a pending checkpoint
REMEDY = "repair the disk or free space, and start the run again: it resumes from the newest checkpoint"

log = logging.getLogger("drawloom.checkpoint")


FULL = {errno.ENOSPC, errno.EDQUOT}


def describe_io_error_on_all_ranks(error: RankError, checkpoints: Path, needed_bytes: int, world: Group) -> str:
    """
    Describe an I/O error in one line, equal on all ranks; for a full disk with the bytes needed and free.

    A collective over `world`: the free bytes are those on the failed rank's machine.
    """
    if error.errno == errno.EFBIG:
        return f"{error}: a limit on the size of files, which `ulimit -f` shows, or one of the file system"
    if error.errno not in FULL:
        return str(error)
    try:
        own_free = format_decimal_byte_size(durable_files.count_free_bytes(checkpoints))
    except OSError:  # the folder may be gone
        own_free = "an unknown number of bytes"
    free = world.gather_json(own_free)[error.rank]
    return f"disk full: needs {format_decimal_byte_size(needed_bytes)}, {free} free in {checkpoints} ({error})"


def _check_free_bytes(checkpoints: Path, expected_bytes: int, likely_bytes: int) -> None:
    """Raise UserError if fewer than `expected_bytes` are free; warn if fewer than twice `likely_bytes` are."""
    free = durable_files.count_free_bytes(checkpoints)
    if free < expected_bytes:
        raise UserError(
            f"{checkpoints}: a checkpoint needs about {format_decimal_byte_size(expected_bytes)}, and "
            f"{format_decimal_byte_size(free)} are free; free some space, or set run.folder to another disk"
        )
    # space for two, because the last checkpoint is removed only after the next commit
    if free < 2 * likely_bytes:
        log.warning(
            "%s: a checkpoint will need about %s, and %s are free; without space for two, saving may fail",
            checkpoints,
            format_decimal_byte_size(likely_bytes),
            format_decimal_byte_size(free),
        )


@attrs.define
class PendingSave:
    """Background save for a step, with its bytes on all ranks."""

    step: int
    bytes: int
    done: Future[None]


@attrs.define(eq=False, kw_only=True)
class Saves:
    """
    Writer of checkpoints in `folder`, one at a time; with `staging`, it writes while training continues.

    `world` and `group` have all ranks; `group` is for the thread that writes. `saved_step` is the step of the newest
    successful or pending save; `is_overdue` is True if a loss has interrupted a save. The run fails after `failures`
    consecutive failed saves.
    """

    folder: Path
    world: Group
    group: Group
    states: Mapping[str, Stateful]
    records: Mapping[str, Durable]
    recipe: ResolvedRecipe
    staging: Stager | None
    retention: Retention
    failures: int
    saved_step: int = internal(0)
    is_overdue: bool = internal(False)
    _failed: int = internal(0)  # consecutive failed saves
    _pending: PendingSave | None = internal(None)

    def open(self) -> None:
        """Create the checkpoint folder, and remove a killed run's leftovers."""
        run_on_rank0(self.world, lambda: commit.create_checkpoints_folder(self.folder))

    def close(self) -> None:
        """Wait up to CLOSE_TIMEOUT for the pending save."""
        if self._pending is not None:
            wait([self._pending.done], CLOSE_TIMEOUT)
            self._pending = None

    def list_steps_on_disk(self) -> list[int]:
        """Return the steps with a checkpoint, ascending, as rank 0 sees them."""
        steps: list[int] = run_on_rank0(
            self.world, lambda: [step_of_checkpoint(path) for path in list_checkpoints(self.folder)]
        )
        return steps

    def list_graph_values(self) -> Iterator[tuple[int, Mapping[str, float | None]]]:
        """Yield the steps with a valid manifest, with the metrics in it."""
        for checkpoint in list_checkpoints(self.folder):
            from drawloom.components.checkpoint.reader import read_manifest_if_sizes_match

            if (manifest := read_manifest_if_sizes_match(checkpoint)) is not None:
                yield manifest.step, manifest.values

    def stage_and_start_write(self, step: Step) -> None:
        """Stage and write a snapshot for an unsaved step, in the background if staging copies."""
        if step.index == self.saved_step:
            return
        self.wait_for_pending_save()  # the pending save first: two copies of the state may not fit into memory
        plan, checkpoint = self._commit_protocol_over_ranks.plan, self.folder / f"step-{step.index}"
        snapshot, sizes = run_and_gather_on_all_ranks(
            self.world,
            lambda: plan.take_snapshot(self.states, step, self.staging),
            to_json=lambda snapshot: snapshot.bytes,
        )
        done = submit_in_new_thread("checkpoint", lambda: self._commit_and_remove_expired(checkpoint, snapshot))
        self._pending = PendingSave(step.index, sum(sizes), done)
        self.saved_step, self.is_overdue = step.index, False

    def wait_if_done_on_all_ranks(self) -> None:
        """End the pending save if it is done on all ranks."""
        if self._pending is None:
            return
        # ranks must agree, because a collective follows
        waiting = torch.tensor(0 if self._pending.done.done() else 1)
        self.world.max(waiting)
        if not waiting.item():
            self.wait_for_pending_save()

    def wait_for_pending_save(self, *, required: bool = False) -> None:
        """
        Wait for the pending save, if there is one.

        Logs an I/O error as a warning. Raises it if the save is `required`, or after `failures` consecutive
        failed saves.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.done.result()
            self._failed = 0
        except UserError as error:
            if not isinstance(error, RankError) or error.errno is None:
                text = f"the checkpoint after step {pending.step} failed: {error}"
                raise UserError(text, error.exit_code) from error
            self.saved_step, self._failed = 0, self._failed + 1
            why = describe_io_error_on_all_ranks(error, self.folder, pending.bytes, self.world)
            if self._failed >= self.failures:
                raise UserError(
                    f"{self._failed} checkpoints in a row failed, "
                    f"at last the one after step {pending.step}: {why}; {REMEDY}"
                ) from error
            if required:
                raise UserError(f"the checkpoint after step {pending.step} failed: {why}; {REMEDY}") from error
            log.warning("checkpoint %d skipped: %s", pending.step, why)

    def check_free_disk_space_on_all_ranks(
        self, growing: Mapping[str, GrowingState], last_checkpoint_bytes: int
    ) -> None:
        """
        Raise UserError on all ranks if the disk has no space for one checkpoint; warn if it has no space for two.

        `last_checkpoint_bytes` is the newest checkpoint's size over all ranks, or 0: a state may exceed its forecast.
        """
        own_bytes = self._commit_protocol_over_ranks.plan.forecast_bytes(self.states, growing)
        total = sum(self.world.gather_json(own_bytes))
        run_on_rank0(self.world, lambda: _check_free_bytes(self.folder, total, max(total, last_checkpoint_bytes)))

    @cached_property
    def _commit_protocol_over_ranks(self) -> commit.CommitProtocol:
        return commit.CommitProtocol(self.group, ShardPlan.compare_across_ranks(self.states, self.world), self.recipe)

    def _commit_and_remove_expired(self, checkpoint: Path, snapshot: Snapshot) -> None:
        """Flush logs, write and commit a snapshot, and remove expired checkpoints."""
        # Dependencies are last: a report hands a waiting step to its trackers, and they are records, too.
        for name, record in reversed([*self.records.items()]):
            try:
                record.flush()  # before the commit, so a checkpoint does not silently outlive its logs
            except OSError as error:
                text = error.strerror or str(error)
                log.warning("[%s] can't be flushed to disk, and a kill or a power cut would lose lines: %s", name, text)
        self._commit_protocol_over_ranks.save(checkpoint, snapshot)
        if self.group.rank == 0:
            run_log.info("checkpoint saved: %s", checkpoint)
            self.retention.remember_as_valid(checkpoint, snapshot.values)
            try:
                commit.remove_checkpoints(self.retention.verify_and_select_expired(self.folder, checkpoint))
            except OSError as error:  # the new checkpoint is committed, and the next save tries again
                log.warning("expired checkpoints in %s could not be removed: %s", self.folder, error)
