"""Checkpointer: snapshot, staging, background write, commit, removal of expired checkpoints, and restore."""

import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs
import torch

from drawloom.components.checkpoint import commit
from drawloom.components.checkpoint.io_errors import check_space_on_all_ranks, describe_io_error
from drawloom.components.checkpoint.manifest import (
    FOLDER,
    CorruptCheckpointError,
    list_checkpoints,
    read_manifest_if_sizes_match,
    step_of_checkpoint,
)
from drawloom.components.checkpoint.memory import StateMemory
from drawloom.components.checkpoint.memory_exchange import (
    HeldState,
    NeighbourCopy,
    PartKey,
    assemble_from_memory,
    copy_to_neighbour,
    find_newest_complete,
)
from drawloom.components.checkpoint.reader import no_valid_checkpoint_error
from drawloom.components.checkpoint.restore import (
    LoadedCheckpoint,
    check_checkpoint_fits_nodes,
    load_states_into_nodes,
    read_states,
    verify_share_of_unread_blocks,
)
from drawloom.components.checkpoint.retention import Retention, RetentionPolicy
from drawloom.components.checkpoint.snapshot import ShardPlan, Snapshot, is_rank_local, slices_by_sharded_entry
from drawloom.components.checkpoint.threads import run_in_current_thread, submit_in_new_thread
from drawloom.components.distributed.rank_errors import RankError, run_on_all_ranks, run_on_rank0
from drawloom.components.ports.distributed import Group, Mesh, Processes, SurvivingProcesses
from drawloom.components.ports.run import (
    Cadence,
    Durable,
    GrowingState,
    RunFolder,
    Stateful,
    Step,
    describe_cadence_fault,
    is_due,
)
from drawloom.components.ports.staging import Stager
from drawloom.components.storage.regular_file import read_file
from drawloom.graph import Every, RecipeError, ResolvedRecipe, UserError, at_least, component, setting
from drawloom.graph.problems import Problem, ReopenError
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.graph.wiring.node import NodeView

MAX_RECIPE_SIZE = 2**26  # bytes
CLOSE_TIMEOUT = 20.0  # seconds that a failing run waits for a pending checkpoint

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
    Checkpointer for all stateful nodes at a cadence and after the last step; restores the newest valid checkpoint.

    With `staging`, a copy is written while training continues; otherwise training waits for the disk. Training
    continues after an I/O error, up to `failures` consecutive failed saves. If the run survives losses, the newest
    state is also held in memory, and restored from there after a loss. With `neighbour_every`, that works without
    replicas: every rank's part of weights and optimizer state is also in another rank's memory.
    """

    number_settings: ClassVar[tuple[str, ...]] = ("best",)

    folder: RunFolder
    mesh: Mesh
    processes: Processes
    states: Every[Stateful]
    growing: Every[GrowingState]
    records: Every[Durable]
    recipe: ResolvedRecipe
    staging: Stager | None = None
    every: Cadence = setting(
        default="last", check=describe_cadence_fault, doc="steps between checkpoints; the last step is always saved"
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
    _memory: StateMemory | None = attrs.field(init=False, default=None)  # None unless the run survives losses
    _joins_others: bool = attrs.field(init=False, default=False)  # the state may be in another process's memory
    _world: Group = attrs.field(init=False)
    _group: Group = attrs.field(init=False)  # for the thread that writes a checkpoint
    _replica: Group = attrs.field(init=False)  # the ranks with the parts of one replica
    _shift: int = attrs.field(init=False, default=0)  # from a rank to its neighbour in `_replica`; 0 without one
    _has_logged_copies: bool = attrs.field(init=False, default=False)

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
            self._memory, self._joins_others = self._memory or StateMemory(), self.processes.generation > 0
            self._find_neighbour()
            self._memory.copies_each_step = not self._shift or self.mesh.replicas.size > 1
        run_on_rank0(self._world, lambda: commit.create_checkpoints_folder_and_clean_up(self._checkpoints_folder))

    def hand_over(self) -> StateMemory | None:
        """Return the memory with the newest states, for the run's next attempt in this process; None without one."""
        return self._memory

    def take_over(self, values: StateMemory | None) -> None:
        """Accept the failed attempt's memory; `restore` prefers its state to an older checkpoint."""
        self._memory = values

    def close(self) -> None:
        """Wait up to CLOSE_TIMEOUT for the pending save, and free the copies' memory."""
        if self._pending is not None:
            wait([self._pending.done], CLOSE_TIMEOUT)
            self._pending = None
        if self.staging is not None:
            self.staging.close()

    def run_phase(self, step: Step) -> None:
        """Save at the cadence, in the background if staging copies. At the last step, wait until the save is done."""
        if self._pending is not None and self._is_done_on_all_ranks(self._pending):
            self._wait_for_pending_save()
        if self.saves_after(step):
            self._stage_and_start_write(step)
            if step.is_last or not self._saves_in_background:
                self._wait_for_pending_save(required=step.is_last)

    def saves_after(self, step: Step) -> bool:
        """Return whether `run_phase` saves a step: at the cadence and at the last step, unless the run goes back."""
        return not step.goes_back and (step.is_last or is_due(self.every, step))

    def save(self, step: Step) -> None:
        """
        Commit a step's checkpoint, unless it is already committed, and wait for it. All ranks call this.

        Raises UserError on every rank if the save fails on any rank; earlier checkpoints are unchanged.
        """
        self._stage_and_start_write(step)
        self._wait_for_pending_save(required=True)

    def wait_until_staged(self) -> None:
        """Wait until the stager has copied the state, which may change from then on."""
        if self.staging is not None:
            self.staging.synchronize_staging()
        if self._memory is not None:
            self._memory.copy_referenced_states()

    def keep_in_memory(self, step: Step) -> None:
        if self._memory is None:
            return
        if not step.goes_back:
            state = self._memory.reference_states(PartKey.here(step.index, self.mesh), self.states)
            if self._shift and not step.is_last and is_due(self.neighbour_every, step):
                self._memory.add_neighbour(self._copy_to_neighbour(state))
        assert isinstance(self.processes, SurvivingProcesses)
        joining = torch.tensor(0 if step.is_last else int(self.processes.has_spares()))
        self._world.max(joining)
        self._memory.drop_older_copies()
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
        if joins_others and (done := self._restore_from_memory()):
            return done
        if self._memory is not None:
            # a run that goes back repeats no later step
            self._memory = StateMemory(self._memory.copies_each_step)
        loaded = self._read_newest_valid()
        if loaded is not None:
            self._load_into_nodes(loaded)
        if joins_others:
            start = (
                f"the state after step {loaded.manifest.step} on disk" if loaded else "step 0: there is no checkpoint"
            )
            run_log.warning(
                "no newer step is complete in the remaining ranks' memory; the run continues from %s", start
            )
        self._saved = loaded.manifest.step if loaded else 0
        self._check_free_disk_space(loaded.manifest.total_file_bytes if loaded else 0)
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
    def _make_commit_protocol(self) -> commit.CommitProtocol:
        return commit.CommitProtocol(self._group, ShardPlan.compare_across_ranks(self.states, self._world), self.recipe)

    def _find_neighbour(self) -> None:
        """Choose the rank that keeps copies of this rank's state: in the same replica, on another machine if any is."""
        if self.neighbour_every == "never":
            return
        self._replica = self.mesh.model_group
        machines = self._replica.gather_json(self.processes.node_rank)
        on_first = machines.count(machines[0])
        self._shift = on_first if on_first < self._replica.size else min(1, self._replica.size - 1)

    def _copy_to_neighbour(self, state: HeldState) -> NeighbourCopy:
        """Send the state to the neighbour, and return the other neighbour's; log the costs of the first copy."""
        start = time.monotonic()
        copy = copy_to_neighbour(self._replica, self._shift, state)
        if not self._has_logged_copies:
            self._has_logged_copies = True
            size = sum(tensor.nbytes for tensor in copy.packed.tensors.values()) / 1e6
            run_log.info(
                "every rank's state is copied to another rank's memory: %.1f MB (twice while it is replaced), and as "
                "much for the own state; %.2f s after every %s steps",
                size,
                time.monotonic() - start,
                self.neighbour_every,
            )
        return copy

    def _restore_from_memory(self) -> int:
        """
        Load the newest state whose parts are all in the remaining ranks' memory, and return its step.

        Ranks without their part receive it from others. Return 0 and load nothing if there is no such state, or if a
        checkpoint on disk is newer.
        """
        assert self._memory is not None
        parts = self._memory.parts()
        own_keys = {key for key, part in parts.items() if isinstance(part, HeldState)}
        own_key = PartKey.here(0, self.mesh)
        gathered = self._world.gather_json([own_key.to_json(), [[key.to_json(), key in own_keys] for key in parts]])
        offers = [{PartKey.from_json(key): is_held for key, is_held in offered} for _, offered in gathered]
        sources = find_newest_complete([[*offered] for offered in offers])
        step = next((key.step for key in sources), 0)
        saved = run_on_rank0(
            self._world, lambda: [step_of_checkpoint(path) for path in list_checkpoints(self._checkpoints_folder)]
        )
        newest = max(saved, default=0)
        if not step or step < newest:
            return 0
        needed = [attrs.evolve(PartKey.from_json(key), step=step) for key, _ in gathered]
        own_key = needed[self._world.rank]
        own = {key: part for key, part in parts.items() if key in sources}
        if all(offered.get(key) for key, offered in zip(needed, offers, strict=True)):
            states = {**self._get_states(own)}
        else:
            packed = {key: part.pack() for key, part in own.items()}
            states = assemble_from_memory(self._world, self.states, sources, packed)
            local = {name: state for name, state in self._get_states(own).items() if is_rank_local(self.states[name])}
            states |= local
            log.info("%s the state after step %d", "sent" if own_key in own_keys else "received", step)
        run_on_all_ranks(self._world, lambda: self._load_state_from_memory(states))
        kept = HeldState.of(own_key, self.states, states)
        self._memory.replace_states_by(kept)  # for another loss in the next step
        copy = self._copy_to_neighbour(kept) if self._shift else None
        run_on_all_ranks(self._world, lambda: None)  # all ranks have their copies before older ones are dropped
        self._memory.share_kept(copy)
        self._saved = step if step == newest else 0
        log.info("restored the state after step %d from memory", step)
        return step

    def _get_states(self, parts: Mapping[PartKey, HeldState | NeighbourCopy]) -> Mapping[str, Any]:
        """Return the states that this rank has held itself; none if all parts are other ranks'."""
        return next((part.states for part in parts.values() if isinstance(part, HeldState)), {})

    def _load_state_from_memory(self, states: Mapping[str, Any]) -> None:
        """Load states into their nodes. A joining rank keeps its initial random generators."""
        for name, state in states.items():
            self.states[name].load_state_dict(state)

    def _stage_and_start_write(self, step: Step) -> None:
        """Stage and write a snapshot for an unsaved step, in the background if staging copies."""
        if step.index == self._saved:
            return
        self._wait_for_pending_save()  # the pending save first: two copies of the state may not fit into memory
        plan, checkpoint = self._make_commit_protocol.plan, self._checkpoints_folder / f"step-{step.index}"
        snapshot, sizes = run_on_all_ranks(
            self._world,
            lambda: plan.take_snapshot(self.states, step, self.staging),
            to_json=lambda snapshot: snapshot.bytes,
        )
        run = submit_in_new_thread if self._saves_in_background else run_in_current_thread
        done = run("checkpoint", lambda: self._write_and_commit(checkpoint, snapshot))
        self._pending = PendingSave(step.index, sum(sizes), done)
        self._saved = step.index

    def _write_and_commit(self, checkpoint: Path, snapshot: Snapshot) -> None:
        """Write and commit a snapshot, and remove expired checkpoints."""
        self._flush_logs()
        self._make_commit_protocol.save(checkpoint, snapshot)
        if self._group.rank == 0:
            run_log.info("checkpoint saved: %s", checkpoint)
            self._retention.mark_valid(checkpoint, snapshot.values)
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
            commit.remove_checkpoints(self._retention.select_expired(self._checkpoints_folder, saved))
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
            why = describe_io_error(error, self._checkpoints_folder, pending.bytes, self._world)
            if self._failed >= self.failures:
                raise UserError(
                    f"{self._failed} checkpoints in a row failed, at last the one after step {pending.step}: {why}; "
                    "repair the disk or free space, and start the run again: it resumes from the newest checkpoint"
                ) from error
            if required:
                raise UserError(f"the checkpoint after step {pending.step} failed: {why}") from error
            log.warning("checkpoint %d skipped: %s", pending.step, why)

    def _read_newest_valid(self) -> LoadedCheckpoint | None:
        """Return the newest checkpoint that is valid on all ranks, with this rank's states."""
        world, corrupt = self._world, dict[Path, str]()
        for step in reversed(
            run_on_rank0(
                world, lambda: [step_of_checkpoint(path) for path in list_checkpoints(self._checkpoints_folder)]
            )
        ):
            checkpoint = self._checkpoints_folder / f"step-{step}"
            loaded, faults = self._read_on_all_ranks(checkpoint)
            if loaded is not None:
                self._retention.mark_valid(checkpoint, loaded.manifest.values)
                return loaded
            corrupt[checkpoint] = "; ".join(filter(None, dict.fromkeys(faults)))
            self._retention.mark_invalid(checkpoint)
            log.warning("%s is corrupt and skipped: %s", checkpoint, corrupt[checkpoint])
        if corrupt:
            raise no_valid_checkpoint_error(self._checkpoints_folder, corrupt)
        return None

    def _read_on_all_ranks(self, checkpoint: Path) -> tuple[LoadedCheckpoint | None, list[str]]:
        """
        Read this rank's states, and verify a checkpoint on all ranks. Returns None, and the faults, if it
        is corrupt.
        """
        world = self._world
        loaded, outcomes = run_on_all_ranks(
            world, lambda: _read_states_or_error(checkpoint, self.states, world.rank), to_json=_encode_read_outcome
        )
        faults = [outcome["fault"] for outcome in outcomes]
        if isinstance(loaded, LoadedCheckpoint) and not any(faults):
            verified = [outcome["verified"] for outcome in outcomes]
            rest = partial(verify_share_of_unread_blocks, checkpoint, loaded.manifest, verified, world.rank, world.size)
            _, faults = run_on_all_ranks(world, rest, to_json=str)
        return (loaded if isinstance(loaded, LoadedCheckpoint) and not any(faults) else None), faults

    def _load_into_nodes(self, loaded: LoadedCheckpoint) -> None:
        world = self._world
        entries_by_rank = world.gather_json(
            {name: [*parts] for name, node in self.states.items() if (parts := slices_by_sharded_entry(node))}
        )
        run_on_all_ranks(
            world,
            lambda: check_checkpoint_fits_nodes(
                loaded, self.states, entries_by_rank, self._find_nodes_with_changed_settings(loaded.checkpoint)
            ),
        )
        run_on_all_ranks(world, lambda: load_states_into_nodes(loaded, self.states))
        log.info("restored %s", loaded.checkpoint)

    def _find_nodes_with_changed_settings(self, checkpoint: Path) -> set[str]:
        """Return the nodes configured differently by the checkpoint's recipe."""
        try:
            text = read_file(checkpoint / LOCK, MAX_RECIPE_SIZE).decode()
            return {change.node for change in self.recipe.changes(text)}
        except (RecipeError, ValueError, OSError):
            return set()  # an unreadable recipe of an older version: the nodes must be the same

    def _check_free_disk_space(self, last: int) -> None:
        """Check the free disk space; `last` is the newest checkpoint's size in bytes, or 0."""
        own_bytes = self._make_commit_protocol.plan.forecast_bytes(self.states, self.growing)
        check_space_on_all_ranks(self._world, self._checkpoints_folder, own_bytes, last)


def _read_states_or_error(
    checkpoint: Path, states: Mapping[str, Stateful], rank: int
) -> LoadedCheckpoint | CorruptCheckpointError:
    """Read a rank's states; return a fault instead of raising it, because all ranks must exchange their outcomes."""
    try:
        return read_states(checkpoint, states, rank)
    except CorruptCheckpointError as error:
        return error


def _encode_read_outcome(loaded: LoadedCheckpoint | CorruptCheckpointError) -> dict[str, Any]:
    """Return this rank's fault (empty if the read succeeded) and verified blocks, as JSON for the other ranks."""
    if isinstance(loaded, CorruptCheckpointError):
        return {"fault": str(loaded), "verified": {}}
    return {"fault": "", "verified": loaded.verified}
