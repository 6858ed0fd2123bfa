"""Checkpointer: snapshot, staging, background write, commit, removal of expired checkpoints, and restore."""

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import attrs
import torch

from drawloom.components.checkpoint import commit
from drawloom.components.checkpoint.io_errors import check_space_on_all_ranks, describe_io_error_on_all_ranks
from drawloom.components.checkpoint.manifest import FOLDER, list_checkpoints, read_manifest_if_sizes_match
from drawloom.components.checkpoint.memory import StateMemory
from drawloom.components.checkpoint.peer_memory import PeerMemory
from drawloom.components.checkpoint.restore_newest import list_steps_on_disk, load_checkpoint, read_newest_valid
from drawloom.components.checkpoint.retention import Retention, RetentionPolicy
from drawloom.components.checkpoint.snapshot import ShardPlan, Snapshot
from drawloom.components.checkpoint.threads import run_in_current_thread, submit_in_new_thread
from drawloom.components.distributed.rank_errors import RankError, run_and_gather_on_all_ranks, run_on_rank0
from drawloom.components.ports.checkpoint import Durable, GrowingState, Stateful
from drawloom.components.ports.distributed import Device, Group, Mesh, Processes, SurvivingProcesses
from drawloom.components.ports.run import Cadence, RunFolder, Step, describe_cadence_fault, exclude_from_rates, is_due
from drawloom.components.ports.staging import Stager
from drawloom.graph import Every, ResolvedRecipe, UserError, at_least, component, setting
from drawloom.graph.problems import Problem, ReopenError
from drawloom.graph.wiring.node import NodeView

MAX_RECIPE_SIZE = 2**26  # bytes
CLOSE_TIMEOUT = 20.0  # seconds that a failing run waits for a pending checkpoint
REMEDY = "repair the disk or free space, and start the run again: it resumes from the newest checkpoint"

log = logging.getLogger("drawloom.checkpoint")
run_log = logging.getLogger("drawloom.run")  # rank 0 prints its messages


@attrs.define
class PendingSave:
    """Background save for a step, with its bytes on all ranks."""

    step: int
    bytes: int
    done: Future[None]


@component(reads=("weights", "loss?", "validation_loss?", "skip?"), impact="safe")
class Checkpointer:
    """
    Checkpointer for all stateful nodes at a cadence; restores the newest valid checkpoint.

    With `staging`, a copy is written while training continues; otherwise training waits for the disk. Training
    continues after an I/O error, up to `failures` consecutive failed saves. If the run survives losses, the newest
    state is also held in memory, and restored from there after a loss. With `neighbour_every`, that works without
    replicas: every rank's part of weights and optimizer state is also in another rank's memory.
    """

    number_settings: ClassVar[tuple[str, ...]] = ("best",)

    folder: RunFolder
    mesh: Mesh
    device: Device
    processes: Processes
    states: Every[Stateful]
    growing: Every[GrowingState]
    records: Every[Durable]
    recipe: ResolvedRecipe
    staging: Stager | None = None
    every: Cadence = setting(
        default="last",
        check=describe_cadence_fault,
        doc="steps between checkpoints, the last step included; 'last': only there; 'never': none, without disk space",
    )
    keep: int = setting(default=3, check=at_least(1), doc="how many of the newest checkpoints to keep")
    keep_every: int | None = setting(
        default=None, check=at_least(1), doc="keep checkpoints permanently at multiples of this step number"
    )
    best: str | None = setting(default=None, doc="metric whose best checkpoint is kept too, such as validation_loss")
    best_is: Literal["lowest", "highest"] = setting(default="lowest", doc="better values of `best`: low or high")
    neighbour_every: Cadence = setting(
        default="never",
        check=describe_cadence_fault,
        doc=(
            "steps between copies of every rank's state in a neighbour's memory, from which the run continues without "
            "a complete replica; needs processes.on_failure = 'continue'"
        ),
    )
    failures: int = setting(default=3, check=at_least(1), doc="consecutive failed saves after which the run stops")

    _saved: int = attrs.field(init=False, default=0)  # the step of the newest successful or pending save
    _failed: int = attrs.field(init=False, default=0)  # consecutive failed saves
    _pending: PendingSave | None = attrs.field(init=False, default=None)
    _memory: StateMemory | None = attrs.field(init=False, default=None)  # of a failed attempt
    _peers: PeerMemory | None = attrs.field(init=False, default=None)  # None unless the run survives losses
    _joins_others: bool = attrs.field(init=False, default=False)  # the state may be in another process's memory
    _is_save_overdue: bool = attrs.field(init=False, default=False)
    _world: Group = attrs.field(init=False)
    _group: Group = attrs.field(init=False)  # for the thread that writes a checkpoint

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report copies for neighbours in a run that ends when a rank is lost."""
        processes = node.neighbour("processes")
        copies = node.settings["neighbour_every"] != "never"
        if copies and processes and processes.settings.get("on_failure") == "stop":
            text = "neighbour_every copies states for a run that survives losses, and this one ends with a loss"
            yield node.problem("neighbour_every", text, f'write on_failure = "continue" in [{processes.name}]')

    def open(self) -> None:
        """Create the checkpoint folder, and remove a killed run's leftovers."""
        self._world, self._group = self.mesh.world, self.processes.make_control_group("checkpoint")
        if isinstance(self.processes, SurvivingProcesses) and self.processes.survives_rank_losses:
            self._joins_others = self.processes.generation > 0
            memory = self._memory or StateMemory()
            self._peers = PeerMemory.choose_neighbours_and_create(
                memory, self.mesh, self.processes, self.states, self.neighbour_every
            )
        run_on_rank0(self._world, lambda: commit.create_checkpoints_folder_and_clean_up(self._checkpoints_folder))

    def hand_over(self) -> StateMemory | None:
        """Return the memory with the newest states, for the run's next attempt in this process; None without one."""
        return self._peers.memory if self._peers else self._memory

    def take_over(self, values: StateMemory | None) -> None:
        """Accept the failed attempt's memory; `restore` prefers its state to an older checkpoint."""
        self._memory = values

    def close(self) -> None:
        """Wait up to CLOSE_TIMEOUT for the pending save, and free the copies' memory."""
        if self._pending is not None:
            wait([self._pending.done], CLOSE_TIMEOUT)
            self._pending = None
        if self._peers is not None:
            self._peers.close(CLOSE_TIMEOUT)
        if self.staging is not None:
            self.staging.close()

    def run_phase(self, step: Step) -> None:
        """Save at the cadence, in the background if staging copies. At the last step, wait until the save is done."""
        if self._pending is not None and self._is_done_on_all_ranks(self._pending):
            self._wait_for_pending_save()
        if self.saves_after(step):
            with exclude_from_rates(step, self.mesh, self.device.device):
                self._stage_and_start_write(step)
                if step.is_last or not self._saves_in_background:
                    self._wait_for_pending_save(required=step.is_last)

    def saves_after(self, step: Step) -> bool:
        """
        Return whether `run_phase` saves a step: at the cadence, unless the run goes back.

        A save that was interrupted by a loss is made after the next step.
        """
        return not step.goes_back and (is_due(self.every, step) or self._is_save_overdue)

    def save(self, step: Step) -> bool:
        """
        Commit a step's checkpoint, unless it is already committed, and wait for it. All ranks call this.

        Returns False, and does nothing, if `every` is "never".
        Raises UserError on every rank if the save fails on any rank; earlier checkpoints are unchanged.
        """
        if self.every == "never":
            return False
        self._stage_and_start_write(step)
        self._wait_for_pending_save(required=True)
        return True

    def wait_until_staged(self) -> None:
        """Wait until the stager has copied the state, which may change from then on."""
        if self.staging is not None:
            self.staging.synchronize_staging()
        if self._peers is not None:
            self._peers.wait_until_copied()

    def keep_in_memory_for_joiners(self, step: Step) -> None:
        if self._peers is None:
            return
        if not step.goes_back:
            self._peers.reference_and_send_to_neighbour(step)
        assert isinstance(self.processes, SurvivingProcesses)
        joining = torch.tensor(0 if step.is_last else int(self.processes.can_grow_with_spares()))
        self._world.max(joining)
        self._peers.memory.drop_older_neighbour_copies()
        if joining:
            raise ReopenError(f"processes join the run after step {step.index}")

    def restore(self) -> int:
        """
        Load the newest valid checkpoint into every stateful node; return its step, or 0 if there is none.

        Skips a corrupt checkpoint with a warning. Raises UserError if all are corrupt, or if the disk has no
        space for another checkpoint.
        """
        self._wait_for_pending_save()  # in a run that goes back, the newest checkpoint may be pending
        joins_others, self._joins_others = self._joins_others, False
        if self._peers is not None:
            newest = max(list_steps_on_disk(self._world, self._checkpoints_folder), default=0) if joins_others else 0
            if joins_others and (done := self._peers.restore(newest)):
                self._saved = done if done == newest else 0
                self._is_save_overdue = isinstance(self.every, int) and done // self.every * self.every > newest
                return done
            self._peers.drop_all_states()  # a run that goes back repeats no later step
        loaded = read_newest_valid(self._world, self._checkpoints_folder, self.states, self._retention)
        if loaded is not None:
            load_checkpoint(self._world, loaded, self.states, self.recipe)
        if joins_others:
            start = (
                f"the state after step {loaded.manifest.step} on disk" if loaded else "step 0: there is no checkpoint"
            )
            run_log.warning(
                "no newer step is complete in the remaining ranks' memory; the run continues from %s", start
            )
        self._saved = loaded.manifest.step if loaded else 0
        if self.every != "never":
            self._check_free_disk_space_on_all_ranks(loaded.manifest.total_file_bytes if loaded else 0)
        return self._saved

    def recorded_step_values(self) -> Iterator[tuple[int, Mapping[str, float | None]]]:
        """Yield the steps with a valid manifest, with the metrics in it."""
        for checkpoint in list_checkpoints(self._checkpoints_folder):
            if (manifest := read_manifest_if_sizes_match(checkpoint)) is not None:
                yield manifest.step, manifest.values

    @cached_property
    def _checkpoints_folder(self) -> Path:
        return self.folder.folder / FOLDER

    @property
    def _saves_in_background(self) -> bool:
        return self.staging is not None and self.staging.makes_copies

    @cached_property
    def _retention(self) -> Retention:
        return Retention(RetentionPolicy(self.keep, self.keep_every, self.best, self.best_is))

    @cached_property
    def _commit_protocol_over_ranks(self) -> commit.CommitProtocol:
        return commit.CommitProtocol(self._group, ShardPlan.compare_across_ranks(self.states, self._world), self.recipe)

    def _stage_and_start_write(self, step: Step) -> None:
        """Stage and write a snapshot for an unsaved step, in the background if staging copies."""
        if step.index == self._saved:
            return
        self._wait_for_pending_save()  # the pending save first: two copies of the state may not fit into memory
        plan, checkpoint = self._commit_protocol_over_ranks.plan, self._checkpoints_folder / f"step-{step.index}"
        snapshot, sizes = run_and_gather_on_all_ranks(
            self._world,
            lambda: plan.take_snapshot(self.states, step, self.staging),
            to_json=lambda snapshot: snapshot.bytes,
        )
        run = submit_in_new_thread if self._saves_in_background else run_in_current_thread
        done = run("checkpoint", lambda: self._commit_and_remove_expired(checkpoint, snapshot))
        self._pending = PendingSave(step.index, sum(sizes), done)
        self._saved, self._is_save_overdue = step.index, False

    def _commit_and_remove_expired(self, checkpoint: Path, snapshot: Snapshot) -> None:
        """Write and commit a snapshot, and remove expired checkpoints."""
        self._flush_logs()
        self._commit_protocol_over_ranks.save(checkpoint, snapshot)
        if self._group.rank == 0:
            run_log.info("checkpoint saved: %s", checkpoint)
            self._retention.remember_as_valid(checkpoint, snapshot.values)
            self._remove_expired(checkpoint)

    def _flush_logs(self) -> None:
        """Flush metric logs before the commit, so a checkpoint does not silently outlive its logs."""
        errors = {}  # by text, because a report flushes its trackers, which are records themselves
        for name, record in self.records.items():
            try:
                record.flush()
            except OSError as error:
                errors[error.strerror or str(error)] = name
        for text, name in errors.items():
            log.warning("[%s] can't be flushed to disk, and a kill or a power cut would lose lines: %s", name, text)

    def _remove_expired(self, saved: Path) -> None:
        """Remove expired checkpoints up to `saved`; only warn if the disk fails."""
        try:
            commit.remove_checkpoints(self._retention.verify_kept_and_select_expired(self._checkpoints_folder, saved))
        except OSError as error:  # the new checkpoint is committed, and the next save tries again
            log.warning("expired checkpoints in %s could not be removed: %s", self._checkpoints_folder, error)

    def _is_done_on_all_ranks(self, pending: PendingSave) -> bool:
        """Return whether a save is done on all ranks."""
        # ranks must agree, because a collective follows
        waiting = torch.tensor(0 if pending.done.done() else 1)
        self._world.max(waiting)
        return not waiting.item()

    def _wait_for_pending_save(self, *, required: bool = False) -> None:
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
            self._saved, self._failed = 0, self._failed + 1
            why = describe_io_error_on_all_ranks(error, self._checkpoints_folder, pending.bytes, self._world)
            if self._failed >= self.failures:
                raise UserError(
                    f"{self._failed} checkpoints in a row failed, "
                    f"at last the one after step {pending.step}: {why}; {REMEDY}"
                ) from error
            if required:
                raise UserError(f"the checkpoint after step {pending.step} failed: {why}; {REMEDY}") from error
            log.warning("checkpoint %d skipped: %s", pending.step, why)

    def _check_free_disk_space_on_all_ranks(self, last_checkpoint_bytes: int) -> None:
        """Check the free disk space; `last_checkpoint_bytes` is 0 without a checkpoint."""
        own_bytes = self._commit_protocol_over_ranks.plan.forecast_bytes(self.states, self.growing)
        check_space_on_all_ranks(self._world, self._checkpoints_folder, own_bytes, last_checkpoint_bytes)
