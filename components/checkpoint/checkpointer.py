"""Checkpoints in the run folder: saved by all ranks together, restored by all from the same step."""

import logging
from collections.abc import Callable
from concurrent.futures import wait
from functools import cached_property
from pathlib import Path
from typing import Literal

import attrs
import torch

from drawloom.components.checkpoint import commit
from drawloom.components.checkpoint.io_errors import Trouble
from drawloom.components.checkpoint.manifest import Damaged
from drawloom.components.checkpoint.reader import FOLDER, committed, none_whole, step_of
from drawloom.components.checkpoint.restore import Found, compare, load, names_of, read_states
from drawloom.components.checkpoint.retention import Rotation, Rules, Values
from drawloom.components.checkpoint.snapshot import RECIPE, Committer, Shares, Snapshot, Writing
from drawloom.components.checkpoint.space import check_space
from drawloom.components.checkpoint.threads import at_once, in_background
from drawloom.components.distributed.rank_errors import on_main, together
from drawloom.components.ports.cadence import Cadence, a_cadence, due
from drawloom.components.ports.distributed import Group, Mesh, Processes
from drawloom.components.ports.run import Event, Events, Lasting, RunFolder, Stateful, Step
from drawloom.components.ports.staging import Stager
from drawloom.graph import Every, RecipeError, ResolvedRecipe, UserError, at_least, component, setting

PATIENCE = 20.0  # seconds that a run which ends by an error waits for a checkpoint that is being written

log = logging.getLogger("drawloom.checkpoint")


@component(reads=("weights", "loss?", "validation_loss?"), change="free")
class CheckpointFolder:
    """
    Saves every stateful node after some steps and after the last, and brings back the newest whole state.

    With `staging` a copy is written while training goes on; without it training waits for the disk. Where the disk
    fails, training goes on from what is committed.
    """

    folder: RunFolder
    mesh: Mesh
    processes: Processes
    states: Every[Stateful]
    records: Every[Lasting]
    recipe: ResolvedRecipe
    staging: Stager | None = None
    events: Events | None = None
    every: Cadence = setting(default="last", check=a_cadence, doc="steps between checkpoints; the last is always saved")
    keep: int = setting(default=3, check=at_least(1), doc="checkpoints that stay, the newest ones")
    keep_every: int | None = setting(default=None, check=at_least(1), doc="steps whose multiples stay for ever")
    best: str | None = setting(default=None, doc="number by which the best stays too, such as validation_loss")
    best_is: Literal["lowest", "highest"] = setting(default="lowest", doc="which value of that number is best")
    failures: int = setting(default=3, check=at_least(1), doc="saves that may fail in a row before the run stops")

    _begun: int = attrs.field(init=False, default=0)
    _failed: int = attrs.field(init=False, default=0)
    _trouble: str = attrs.field(init=False, default="")
    _skipped: int = attrs.field(init=False, default=0)
    _writing: Writing | None = attrs.field(init=False, default=None)
    _group: Group | None = attrs.field(init=False, default=None)

    def open(self) -> None:
        """Make the folder of checkpoints, and sweep out what a dead run left."""
        on_main(self.mesh.world, lambda: commit.prepare(self._checkpoints))
        self._group = self.processes.apart("checkpoint")

    def close(self) -> None:
        """Wait a little for what is being written, and give the memory of copies back."""
        if self._writing is not None:
            wait([self._writing.done], PATIENCE)
            self._writing = None
        if self.staging is not None:
            self.staging.close()

    def run_phase(self, step: Step) -> None:
        """Save, if it is time to; after the last step always, and then wait for the disk too."""
        if self._writing is not None and self._is_done(self._writing):
            self._finish_writing()
        if step.last:
            self.save(step)
        elif due(self.every, step):
            self._told(step, self._begin)
        self._tell_trouble()

    def save(self, step: Step) -> None:
        """
        Commit the state after a step, unless that is done. All ranks call this.

        Raises UserError on every rank if any of them fails; what was committed before is untouched.
        """
        if step.index != self._begun or self._writing is not None:
            self._told(step, self._begin_and_finish)

    def staged(self) -> None:
        """Return when the state may change although it is being saved. All ranks call this."""
        if self._writing is not None and self.staging is not None and not self._writing.staged:
            together(self.mesh.world, self.staging.synchronize_staging)
            self._writing.staged = True

    def restore(self) -> int:
        """
        Load the newest whole checkpoint into every stateful node; its step, 0 if there is none.

        A damaged one is named in a warning, passed over, and left as it is. Raises UserError if all are damaged, or if
        there is no room for another one.
        """
        found = self._find()
        if found is not None:
            self._load(found)
        self._begun = found.manifest.step if found else 0
        self._check_space(found.manifest.bytes if found else 0)
        return self._begun

    @property
    def _checkpoints(self) -> Path:
        return self.folder.folder / FOLDER

    @cached_property
    def _rotation(self) -> Rotation:
        return Rotation(Rules(self.keep, self.keep_every, self.best, self.best_is))

    @cached_property
    def _committer(self) -> Committer:
        shares = Shares.of(self.states, self.mesh.world)
        return Committer(self._group or self.mesh.world, shares, self.recipe, self._make_records_last, self._rotate)

    def _told(self, step: Step, work: Callable[[Step], None]) -> None:
        """Do something that takes longer than a step may, and tell listeners so."""
        events = self.events
        if events is not None:
            events.tell(Event("saving_started", step))
        try:
            work(step)
        finally:
            if events is not None:
                events.tell(Event("saving_ended", step))

    def _begin(self, step: Step) -> None:
        """Copy the state and begin to write it, when the one before is written."""
        self._finish_writing()
        self._tell_trouble()
        committer, checkpoint = self._committer, self._checkpoints / f"step-{step.index}"
        taken: list[Snapshot] = []
        sizes = together(self.mesh.world, lambda: self._take(step, taken))
        [snapshot] = taken
        copied = self.staging is not None and self.staging.copies
        begin = in_background if copied else at_once
        done = begin("checkpoint", lambda: committer.commit(checkpoint, snapshot))
        self._writing = Writing(step.index, sum(sizes), done, snapshot.staged)
        self._begun = step.index
        if not copied:
            self._finish_writing()

    def _take(self, step: Step, taken: list[Snapshot]) -> int:
        """Copy this rank's share; how many bytes it has."""
        taken.append(self._committer.shares.take(self.states, step, self.staging))
        return taken[0].bytes

    def _begin_and_finish(self, step: Step) -> None:
        if step.index != self._begun:
            self._begin(step)
        self._finish_writing()
        if self._skipped == step.index:
            self._skipped = 0
            raise UserError(f"the checkpoint after step {step.index} failed: {self._trouble}")

    def _tell_trouble(self) -> None:
        """Say that a checkpoint was skipped, in one line, and only once."""
        if self._skipped:
            log.warning("checkpoint %d skipped: %s", self._skipped, self._trouble)
            self._skipped = 0

    def _is_done(self, under_way: Writing) -> bool:
        """Whether it is on all ranks."""
        waiting = torch.tensor(0 if under_way.done.done() else 1)
        self.mesh.world.max(waiting)
        return not waiting.item()

    def _finish_writing(self) -> None:
        """Wait for what is being written. The run can live with trouble with the disk, for a while."""
        under_way, self._writing = self._writing, None
        if under_way is None:
            return
        try:
            under_way.done.result()
            self._failed = 0
        except Trouble as trouble:
            self._begun, self._skipped, self._failed = 0, under_way.step, self._failed + 1
            self._trouble = trouble.told(self._checkpoints, under_way.bytes)
            if self._failed >= self.failures:
                raise UserError(
                    f"{self._failed} checkpoints in a row failed, at last the one after step {under_way.step}: "
                    f"{self._trouble}; see to the disk, and start the run again: it goes on from what is committed"
                ) from trouble
        except UserError as error:
            raise UserError(f"the checkpoint after step {under_way.step} failed: {error}", error.exit_code) from error

    def _make_records_last(self) -> None:
        """What is written down of the steps before a checkpoint lasts at least as long as it."""
        for name, record in self.records.items():
            try:
                record.make_last()
            except OSError as error:
                log.warning("[%s] is not safe from a power cut: %s", name, error)

    def _rotate(self, saved: Path, values: Values) -> None:
        """Make room, now that a checkpoint is committed. A failure changes nothing of what is."""
        log.info("saved %s", saved)
        self._rotation.trust(saved, values)
        try:
            commit.discard(self._rotation.gone(self._checkpoints, saved))
        except OSError as error:
            log.warning("%s could not be tidied: %s", self._checkpoints, error)

    def _find(self) -> Found | None:
        """The newest checkpoint that is whole on all ranks, read by each as far as it needs it."""
        world, damaged = self.mesh.world, dict[Path, str]()
        for step in reversed(on_main(world, lambda: [step_of(path) for path in committed(self._checkpoints)])):
            checkpoint, found = self._checkpoints / f"step-{step}", list[Found]()
            faults = together(world, lambda: self._read(checkpoint, found))  # noqa: B023
            if not any(faults):
                self._rotation.trust(checkpoint, found[0].manifest.values)
                return found[0]
            damaged[checkpoint] = "; ".join(filter(None, dict.fromkeys(faults)))
            self._rotation.distrust(checkpoint)
            log.warning("%s is damaged and passed over: %s", checkpoint, damaged[checkpoint])
        if damaged:
            raise none_whole(self._checkpoints, damaged)
        return None

    def _read(self, checkpoint: Path, found: list[Found]) -> str:
        """Read what this rank needs; what is wrong with it, if anything is."""
        world = self.mesh.world
        try:
            found.append(read_states(checkpoint, self.states, world.rank, world.size))
        except Damaged as error:
            return str(error)
        return ""

    def _load(self, found: Found) -> None:
        world = self.mesh.world
        held = world.gather_json({name: names for name, node in self.states.items() if (names := names_of(node))})
        together(world, lambda: compare(found, self.states, held, self._changed(found.checkpoint)))
        together(world, lambda: load(found, self.states))
        log.info("restored %s", found.checkpoint)

    def _changed(self, checkpoint: Path) -> set[str]:
        """The nodes in which the recipe differs from the one that saved."""
        try:
            return {change.node for change in self.recipe.changes((checkpoint / RECIPE).read_text("utf-8"))}
        except (RecipeError, ValueError):
            return set()  # then the nodes must be the same

    def _check_space(self, last: int) -> None:
        """`last` is how many bytes the newest checkpoint has."""
        now = self._committer.shares.take(self.states, Step(0, 0))
        fresh = any(names_of(node) and not node.state_dict() for node in self.states.values())
        likely = now.bytes * (3 if fresh else 1)  # an optimizer that has not stepped will have two moments, most likely
        check_space(self.mesh.world, self._checkpoints, now.bytes, max(likely, last // self.mesh.world.size))
