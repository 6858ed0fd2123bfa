"""Checkpointer: when checkpoints are saved, and which state a run continues from."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from drawloom import Every, NodeView, Problem, ResolvedRecipe, at_least, component, internal, setting
from drawloom.graph.problems import ReopenError
from drawloom.ports import (
    Cadence,
    Device,
    Durable,
    GrowingState,
    Mesh,
    Processes,
    RunFolder,
    Stager,
    Stateful,
    Step,
    describe_cadence_fault,
    exclude_from_rates,
    is_due,
    run_log,
)

if TYPE_CHECKING:
    from drawloom.components.checkpoint.peer_memory import PeerMemory, StateMemory
    from drawloom.components.checkpoint.saves import Saves


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
        "steps between checkpoints, the last step included; 'last': only there; 'never': none, without disk space",
        default="last",
        check=describe_cadence_fault,
    )
    keep: int = setting("how many of the newest checkpoints to keep", default=3, check=at_least(1))
    keep_every: int | None = setting(
        "keep checkpoints permanently at multiples of this step number", default=None, check=at_least(1)
    )
    best: str | None = setting("metric whose best checkpoint is kept too, such as validation_loss", default=None)
    best_is: Literal["lowest", "highest"] = setting("better values of `best`: low or high", default="lowest")
    neighbour_every: Cadence = setting(
        "steps between copies of every rank's state in a neighbour's memory, from which the run continues without "
        "a complete replica; needs processes.on_failure = 'continue'",
        default="never",
        check=describe_cadence_fault,
    )
    failures: int = setting("consecutive failed saves after which the run stops", default=3, check=at_least(1))

    _saves: "Saves" = internal(None)
    _memory: "StateMemory | None" = internal(None)  # of a failed attempt
    _peers: "PeerMemory | None" = internal(None)  # None unless the run survives losses
    _joins_others: bool = internal(False)  # the state may be in another process's memory

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
        # imported where they are used: a check needs the settings alone, and few runs survive losses
        from drawloom.components.checkpoint.commit import FOLDER
        from drawloom.components.checkpoint.saves import Retention, Saves

        self._saves = Saves(
            folder=self.folder.folder / FOLDER,
            world=self.mesh.world,
            group=self.processes.make_control_group("checkpoint"),
            states=self.states,
            records=self.records,
            recipe=self.recipe,
            staging=self.staging,
            retention=Retention(self.keep, self.keep_every, self.best, self.best_is),
            failures=self.failures,
        )
        if self.processes.survives_rank_losses:
            from drawloom.components.checkpoint.peer_memory import PeerMemory

            self._joins_others = self.processes.generation > 0
            self._peers = PeerMemory.choose_neighbours_and_create(
                self._memory, self.mesh, self.processes, self.states, self.neighbour_every
            )
        self._saves.open()

    def hand_over(self) -> "StateMemory | None":
        """Return the memory with the newest states, for the run's next attempt in this process; None without one."""
        return self._peers.memory if self._peers else self._memory

    def take_over(self, values: "StateMemory | None") -> None:
        """Accept the failed attempt's memory; `restore` prefers its state to an older checkpoint."""
        self._memory = values

    def close(self) -> None:
        """Wait for a pending save for a while, and free the copies' memory."""
        if self._saves is not None:
            self._saves.close()
        if self._peers is not None:
            self._peers.close()
        if self.staging is not None:
            self.staging.close()

    def run_phase(self, step: Step) -> None:
        """Save at the cadence, in the background if staging copies. At the last step, wait until the save is done."""
        self._saves.wait_if_done_on_all_ranks()
        if self.saves_after(step):
            trains_on = not step.is_last and self.staging is not None and self.staging.makes_copies
            with exclude_from_rates(step, self.mesh, self.device.device):
                self._saves.stage_and_start_write(step)
                if not trains_on:
                    self._saves.wait_for_pending_save(required=step.is_last)

    def saves_after(self, step: Step) -> bool:
        """
        Return whether `run_phase` saves a step: at the cadence, unless the run goes back.

        A save that was interrupted by a loss is made after the next step.
        """
        return not step.goes_back and (is_due(self.every, step) or self._saves.is_overdue)

    def save(self, step: Step) -> bool:
        """
        Commit a step's checkpoint, unless it is already committed, and wait for it. All ranks call this.

        Returns False, and does nothing, if `every` is "never".
        Raises UserError on every rank if the save fails on any rank; earlier checkpoints are unchanged.
        """
        if self.every == "never":
            return False
        self._saves.stage_and_start_write(step)
        self._saves.wait_for_pending_save(required=True)
        return True

    def wait_until_staged(self) -> None:
        """Wait until the stager has copied the state, which may change from then on."""
        if self.staging is not None and self.staging.should_synchronize_after_execute:
            self.staging.synchronize_staging()
        if self._peers is not None:
            self._peers.wait_until_copied()

    def keep_in_memory_for_joiners(self, step: Step) -> None:
        if self._peers is None:
            return
        if not step.goes_back:
            self._peers.reference_and_send(step)
        joining = torch.tensor(0 if step.is_last else int(self.processes.can_grow_with_spares(self._peers.state_bytes)))
        self.mesh.world.max(joining)
        self._peers.memory.drop_older_neighbour_copies()
        if joining:
            raise ReopenError(f"processes join the run after step {step.index}")

    def restore(self) -> int:
        """
        Load the newest valid checkpoint into every stateful node; return its step, or 0 if there is none.

        Skips a corrupt checkpoint with a warning. Raises UserError if all are corrupt, or if the disk has no
        space for another checkpoint.
        """
        world, saves = self.mesh.world, self._saves
        saves.wait_for_pending_save()  # in a run that goes back, the newest checkpoint may be pending
        joins_others, self._joins_others = self._joins_others, False
        steps = saves.list_steps_on_disk()
        if self._peers is not None:
            newest = max(steps, default=0)
            if joins_others and (done := self._peers.restore(newest)):
                saves.saved_step = done if done == newest else 0
                # in epochs, a save may have been due since the newest checkpoint, and another one does no harm
                last_due = done // self.every * self.every if isinstance(self.every, int) else done
                saves.is_overdue = self.every not in ("last", "never") and last_due > newest
                return done
            self._peers.drop_all_states()  # a run that goes back repeats no later step
        loaded = None
        if steps:
            from drawloom.components.checkpoint.restore import load_checkpoint, read_newest_valid

            loaded = read_newest_valid(world, saves.folder, steps, self.states, saves.retention)
            load_checkpoint(world, loaded, self.states, self.recipe)
        if joins_others:
            start = (
                f"the state after step {loaded.manifest.step} on disk" if loaded else "step 0: there is no checkpoint"
            )
            run_log.warning(
                "no newer step is complete in the remaining ranks' memory; the run continues from %s", start
            )
        saves.saved_step = loaded.manifest.step if loaded else 0
        if self.every != "never":
            saves.check_free_disk_space_on_all_ranks(self.growing, loaded.manifest.total_file_bytes if loaded else 0)
        return saves.saved_step

    def recorded_step_values(self) -> Iterable[tuple[int, Mapping[str, float | None]]]:
        """Yield the steps with a valid manifest, with the metrics in it."""
        return self._saves.list_graph_values()
