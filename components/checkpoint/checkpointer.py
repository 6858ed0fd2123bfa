"""The checkpointer: snapshot, stage, write in the background, commit, remove what has expired; and restore."""

import logging
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Literal

import attrs
import torch

from drawloom.components.checkpoint import commit
from drawloom.components.checkpoint.io_errors import check_space, described
from drawloom.components.checkpoint.manifest import FOLDER, CorruptCheckpoint, committed, step_of
from drawloom.components.checkpoint.reader import none_whole
from drawloom.components.checkpoint.restore import LoadedCheckpoint, compare, load, read_states
from drawloom.components.checkpoint.retention import Retention, RetentionPolicy
from drawloom.components.checkpoint.snapshot import ShardPlan, Snapshot, names_of
from drawloom.components.checkpoint.threads import run_now, submit
from drawloom.components.distributed.rank_errors import Agreed, run_on_all, run_on_rank0
from drawloom.components.ports.distributed import Group, Mesh, Processes
from drawloom.components.ports.run import Cadence, Durable, Event, Events, RunFolder, Stateful, Step, a_cadence, due
from drawloom.components.ports.staging import Stager
from drawloom.graph import Every, RecipeError, ResolvedRecipe, UserError, at_least, component, setting
from drawloom.graph.recipe.lockfile import LOCK

CLOSE_TIMEOUT = 20.0  # seconds that a run which ends by an error waits for a checkpoint that is being written

log = logging.getLogger("drawloom.checkpoint")


@attrs.define
class Writing:
    """A save in the background: of which step, its bytes on all ranks, and whether the state may change already."""

    step: int
    bytes: int
    done: Future[None]
    staged: bool


@component(reads=("weights", "loss?", "validation_loss?"), impact="safe")
class Checkpointer:
    """
    Saves every stateful node after some steps and after the last, and restores the newest valid checkpoint.

    With `staging` a copy is written while training continues; without it training waits for the disk. After an I/O
    error training continues, and the next save is tried.
    """

    folder: RunFolder
    mesh: Mesh
    processes: Processes
    states: Every[Stateful]
    records: Every[Durable]
    recipe: ResolvedRecipe
    staging: Stager | None = None
    events: Events | None = None
    every: Cadence = setting(default="last", check=a_cadence, doc="steps between checkpoints; the last is always saved")
    keep: int = setting(default=3, check=at_least(1), doc="how many checkpoints are kept, the newest ones")
    keep_every: int | None = setting(
        default=None, check=at_least(1), doc="checkpoints of steps that are multiples of this never expire"
    )
    best: str | None = setting(
        default=None, doc="number by which the best checkpoint is kept too, such as validation_loss"
    )
    best_is: Literal["lowest", "highest"] = setting(default="lowest", doc="which value of that number is best")
    failures: int = setting(default=3, check=at_least(1), doc="saves that may fail in a row before the run stops")

    _saved: int = attrs.field(init=False, default=0)  # the step of the newest save that has not failed
    _failed: int = attrs.field(init=False, default=0)  # how many saves failed in a row
    _writing: Writing | None = attrs.field(init=False, default=None)
    _group: Group | None = attrs.field(init=False, default=None)

    def open(self) -> None:
        """Create the folder of checkpoints, and sweep what a killed run left."""
        run_on_rank0(self.mesh.world, lambda: commit.prepare(self._checkpoints))
        self._group = self.processes.control_group("checkpoint")

    def close(self) -> None:
        """Wait for the save in the background, but not for ever, and free the memory of copies."""
        if self._writing is not None:
            wait([self._writing.done], CLOSE_TIMEOUT)
            self._writing = None
        if self.staging is not None:
            self.staging.close()

    def run_phase(self, step: Step) -> None:
        """Save after the steps of the cadence in the background, and after the last one before this returns."""
        if self._writing is not None and self._is_done(self._writing):
            self._finish()
        if step.last:
            self.save(step)
        elif due(self.every, step):
            with self._saving(step):
                self._start(step)
                if not self._in_background:
                    self._finish()

    def save(self, step: Step) -> None:
        """
        Commit the state after a step before this returns, unless it is committed. All ranks call this.

        Raises UserError on every rank if it fails on any; what was committed before is untouched.
        """
        if step.index == self._saved and self._writing is None:
            return
        with self._saving(step):
            if step.index != self._saved:
                self._start(step)
            self._finish(required=True)

    def staged(self) -> None:
        """Return when the state may change although it is being saved. All ranks call this."""
        if self._writing is not None and self.staging is not None and not self._writing.staged:
            run_on_all(self.mesh.world, self.staging.synchronize_staging)
            self._writing.staged = True

    def restore(self) -> int:
        """
        Load the newest valid checkpoint into every stateful node; its step, 0 if there is none.

        A damaged one is skipped with a warning. Raises UserError if all are damaged, or if there is no room for
        another checkpoint.
        """
        found = self._find()
        if found is not None:
            self._load(found)
        self._saved = found.manifest.step if found else 0
        self._check_space(found.manifest.bytes if found else 0)
        return self._saved

    @property
    def _checkpoints(self) -> Path:
        return self.folder.folder / FOLDER

    @property
    def _in_background(self) -> bool:
        return self.staging is not None and self.staging.copies

    @cached_property
    def _retention(self) -> Retention:
        return Retention(RetentionPolicy(self.keep, self.keep_every, self.best, self.best_is))

    @cached_property
    def _protocol(self) -> commit.CommitProtocol:
        shares = ShardPlan.of(self.states, self.mesh.world)
        return commit.CommitProtocol(self._group or self.mesh.world, shares, self.recipe)

    @contextmanager
    def _saving(self, step: Step) -> Iterator[None]:
        """Tell listeners that ranks may wait longer for one another than a step takes."""
        if self.events is not None:
            self.events.emit(Event("saving_started", step))
        try:
            yield
        finally:
            if self.events is not None:
                self.events.emit(Event("saving_ended", step))

    def _start(self, step: Step) -> None:
        """Take and stage a snapshot, and write it; first wait for the save before, so that there is only one copy."""
        self._finish()
        shares, checkpoint = self._protocol.shares, self._checkpoints / f"step-{step.index}"
        snapshot, sizes = run_on_all(
            self.mesh.world,
            lambda: shares.take(self.states, step, self.staging),
            share=lambda taken: taken.bytes,
        )
        run = submit if self._in_background else run_now
        done = run("checkpoint", lambda: self._write(checkpoint, snapshot))
        self._writing = Writing(step.index, sum(sizes), done, snapshot.staged)
        self._saved = step.index

    def _write(self, checkpoint: Path, snapshot: Snapshot) -> None:
        """Write and commit a snapshot, and remove expired checkpoints; in the background, if staging copies."""
        self._flush_logs()
        self._protocol.save(checkpoint, snapshot)
        if self._protocol.group.rank == 0:
            log.info("saved %s", checkpoint)
            self._retention.mark_valid(checkpoint, snapshot.values)
            self._remove_expired(checkpoint)

    def _flush_logs(self) -> None:
        """Flush metric logs to disk before committing, so that a checkpoint never outlives its logs."""
        for name, record in self.records.items():
            try:
                record.flush()
            except OSError as error:
                log.warning("[%s] is not safe from a power cut: %s", name, error)

    def _remove_expired(self, saved: Path) -> None:
        try:
            commit.discard(self._retention.expired(self._checkpoints, saved))
        except OSError as error:  # the new checkpoint is committed all the same, and the next save tries again
            log.warning("expired checkpoints in %s could not be removed: %s", self._checkpoints, error)

    def _is_done(self, writing: Writing) -> bool:
        """Whether a save is done on all ranks."""
        waiting = torch.tensor(0 if writing.done.done() else 1)
        self.mesh.world.max(waiting)
        return not waiting.item()

    def _finish(self, *, required: bool = False) -> None:
        """
        Wait for the save in the background, if there is one.

        If an I/O error has failed it, that is one warning, and an error only if the save is `required`, or if
        `failures` saves in a row have failed.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.done.result()
            self._failed = 0
        except UserError as error:
            if not isinstance(error, Agreed) or error.errno is None:
                text = f"the checkpoint after step {writing.step} failed: {error}"
                raise UserError(text, error.exit_code) from error
            self._saved, self._failed = 0, self._failed + 1
            why = described(error, self._checkpoints, writing.bytes)
            if self._failed >= self.failures:
                raise UserError(
                    f"{self._failed} checkpoints in a row failed, at last the one after step {writing.step}: {why}; "
                    "repair the disk or make room, and start the run again: it resumes from the newest checkpoint"
                ) from error
            if required:
                raise UserError(f"the checkpoint after step {writing.step} failed: {why}") from error
            log.warning("checkpoint %d skipped: %s", writing.step, why)

    def _find(self) -> LoadedCheckpoint | None:
        """The newest checkpoint that is valid on all ranks; each has read what it needs."""
        world, damaged = self.mesh.world, dict[Path, str]()
        for step in reversed(run_on_rank0(world, lambda: [step_of(path) for path in committed(self._checkpoints)])):
            checkpoint = self._checkpoints / f"step-{step}"
            found, faults = run_on_all(world, lambda: self._read(checkpoint), share=_fault)  # noqa: B023
            if isinstance(found, LoadedCheckpoint) and not any(faults):
                self._retention.mark_valid(checkpoint, found.manifest.values)
                return found
            damaged[checkpoint] = "; ".join(filter(None, dict.fromkeys(faults)))
            self._retention.mark_invalid(checkpoint)
            log.warning("%s is damaged and skipped: %s", checkpoint, damaged[checkpoint])
        if damaged:
            raise none_whole(self._checkpoints, damaged)
        return None

    def _read(self, checkpoint: Path) -> LoadedCheckpoint | CorruptCheckpoint:
        """What this rank needs of a checkpoint, or what is wrong with it."""
        world = self.mesh.world
        try:
            return read_states(checkpoint, self.states, world.rank, world.size)
        except CorruptCheckpoint as error:
            return error

    def _load(self, found: LoadedCheckpoint) -> None:
        world = self.mesh.world
        held = world.gather_json({name: names for name, node in self.states.items() if (names := names_of(node))})
        run_on_all(world, lambda: compare(found, self.states, held, self._changed(found.checkpoint)))
        run_on_all(world, lambda: load(found, self.states))
        log.info("restored %s", found.checkpoint)

    def _changed(self, checkpoint: Path) -> set[str]:
        """The nodes in which the recipe differs from the one that saved."""
        try:
            return {change.node for change in self.recipe.changes((checkpoint / LOCK).read_text("utf-8"))}
        except (RecipeError, ValueError):
            return set()  # an older recipe that this version can't read; then the nodes must be the same

    def _check_space(self, last: int) -> None:
        """`last` is the size of the newest checkpoint in bytes, 0 if there is none."""
        now = self._protocol.shares.take(self.states, Step(0, 0))
        fresh = any(names_of(node) and not node.state_dict() for node in self.states.values())
        likely = now.bytes * (3 if fresh else 1)  # an optimizer that has not stepped will have two moments, most likely
        check_space(self.mesh.world, self._checkpoints, now.bytes, max(likely, last // self.mesh.world.size))


def _fault(found: LoadedCheckpoint | CorruptCheckpoint) -> str:
    return str(found) if isinstance(found, CorruptCheckpoint) else ""
