"""Checkpoints in the run folder: saved by all ranks together, restored by all from the same step."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.checkpoint import files, writing
from drawloom.components.checkpoint.files import Content
from drawloom.components.checkpoint.loading import is_local, load_states
from drawloom.components.checkpoint.manifest import Manifest, looks_whole
from drawloom.components.checkpoint.reading import FOLDER, committed, newest, step_of
from drawloom.components.distributed.agreement import on_main, together
from drawloom.components.ports.cadence import Cadence, a_cadence, due
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import Event, Events, Moment, RunFolder, Stateful, Step
from drawloom.graph import Every, RecipeError, ResolvedRecipe, UserError, at_least, component, setting

RECIPE = "recipe.lock.toml"

log = logging.getLogger("drawloom.checkpoint")


@component(reads=("weights",), change="free")
class CheckpointFolder:
    """Saves every stateful node after some steps and after the last, and brings back the newest whole state."""

    folder: RunFolder
    mesh: Mesh
    states: Every[Stateful]
    recipe: ResolvedRecipe
    events: Events | None = None
    every: Cadence = setting(default="last", check=a_cadence, doc="steps between checkpoints; the last is always saved")
    keep: int = setting(default=3, check=at_least(1), doc="checkpoints that stay, the newest ones")

    _saved: int = attrs.field(init=False, default=0)
    _damaged: set[Path] = attrs.field(init=False, factory=set)

    def open(self) -> None:
        """Make the folder of checkpoints, and sweep out what a dead run left."""
        on_main(self.mesh.world, lambda: writing.prepare(self._checkpoints))

    def run_phase(self, step: Step) -> None:
        """Save, if it is time to, and after the last step always."""
        if step.last or due(self.every, step):
            self.save(step)

    def save(self, step: Step) -> None:
        """
        Commit the state after a step, unless that is done. All ranks call this.

        Raises UserError on every rank if any of them fails; what was committed before is untouched.
        """
        if step.index == self._saved:
            return
        self._tell("saving_started", step)
        try:
            self._write_and_commit(self._checkpoint(step.index))
            self._saved = step.index
        except UserError as error:
            raise UserError(f"the checkpoint after step {step.index} failed: {error}", error.exit_code) from error
        finally:
            self._tell("saving_ended", step)

    def restore(self) -> int:
        """Load the newest whole checkpoint into every stateful node; its step, 0 if there is none."""
        step: int = on_main(self.mesh.world, self._choose)
        if step:
            together(self.mesh.world, lambda: self._load(self._checkpoint(step)))
            log.info("restored %s", self._checkpoint(step))
        self._saved = step
        return step

    @property
    def _checkpoints(self) -> Path:
        return self.folder.folder / FOLDER

    def _checkpoint(self, step: int) -> Path:
        return self._checkpoints / f"step-{step}"

    def _names(self, *, local: bool) -> list[str]:
        """The nodes of which each rank has its own state, or those whose state is the same on all."""
        return [name for name, node in self.states.items() if is_local(node) == local]

    def _write_and_commit(self, checkpoint: Path) -> None:
        world = self.mesh.world
        aside = Path(on_main(world, lambda: str(writing.begin(checkpoint))))
        try:
            written = together(world, lambda: self._write(aside))
            on_main(world, lambda: self._commit(checkpoint, aside, written))
        except UserError:
            self._clean_up(lambda: files.remove_folder(aside))
            raise
        log.info("saved %s", checkpoint)
        self._clean_up(lambda: self._rotate(checkpoint))

    def _write(self, aside: Path) -> dict[str, Any]:
        """Write this rank's states; file name to content, as JSON carries it."""
        rank = self.mesh.world.rank
        names = [*(self._names(local=False) if rank == 0 else []), *self._names(local=True)]
        states = {name: self.states[name].state_dict() for name in names}
        return {name: attrs.asdict(content) for name, content in writing.write_rank(aside, rank, states).items()}

    def _commit(self, checkpoint: Path, aside: Path, written: list[dict[str, Any]]) -> None:
        contents = {name: Content(**content) for by_name in written for name, content in by_name.items()}
        contents[RECIPE] = files.write_file(aside / RECIPE, self.recipe.text.encode())
        manifest = Manifest(
            step=step_of(checkpoint),
            recipe=self.recipe.hash,
            world_size=self.mesh.world.size,
            replicated=self._names(local=False),
            local=self._names(local=True),
            files=contents,
        )
        writing.commit(checkpoint, manifest)
        self._damaged.discard(checkpoint)

    def _rotate(self, saved: Path) -> None:
        """Remove all but the newest up to the one just saved. What is damaged does not count, and stays."""
        candidates = [path for path in committed(self._checkpoints) if step_of(path) <= step_of(saved)]
        whole = [path for path in candidates if path not in self._damaged and looks_whole(path)]
        writing.discard(whole[: -self.keep])

    def _clean_up(self, work: Callable[[], None]) -> None:
        """Do something on the main rank whose failure changes nothing that is committed."""
        try:
            if self.mesh.world.rank == 0:
                work()
        except OSError as error:
            log.warning("%s could not be tidied: %s", self._checkpoints, error)

    def _choose(self) -> int:
        """The step of the newest whole checkpoint, 0 if there is none; those after it are damaged."""
        chosen = newest(self.folder.folder)
        step = 0 if chosen is None else step_of(chosen)
        self._damaged = {path for path in committed(self._checkpoints) if step_of(path) > step}
        return step

    def _load(self, checkpoint: Path) -> None:
        try:
            changes = self.recipe.changes((checkpoint / RECIPE).read_text("utf-8"))
        except (RecipeError, ValueError):
            changes = []  # then the nodes must be the same
        load_states(checkpoint, self.states, self.mesh.world.rank, {change.node for change in changes})

    def _tell(self, moment: Moment, step: Step) -> None:
        if self.events is not None:
            self.events.tell(Event(moment, step))
