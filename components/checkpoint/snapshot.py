"""What one rank saves of a step, and how all ranks make a checkpoint of it."""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from drawloom.components.checkpoint import commit as writing
from drawloom.components.checkpoint.io_errors import Trouble, in_step, main_in_step
from drawloom.components.checkpoint.manifest import Manifest
from drawloom.components.checkpoint.reader import step_of
from drawloom.components.checkpoint.restore import is_local, names_of
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.run import Stateful, Step
from drawloom.components.ports.staging import Stager
from drawloom.components.storage import durable_files
from drawloom.components.storage.durable_files import Content
from drawloom.components.storage.state_tree import Tree, pack
from drawloom.graph import ResolvedRecipe

RECIPE = "recipe.lock.toml"


@attrs.define
class Writing:
    """A checkpoint on its way: of which step, how many bytes this rank has of it, and whether it may change."""

    step: int
    bytes: int
    done: Future[None]
    staged: bool


@attrs.frozen
class Snapshot:
    """What a rank saves of a step: a tree, the tensors that it names, how many bytes they have, and some numbers."""

    tree: Tree
    tensors: dict[str, Tensor] | Future[dict[str, Tensor]]
    bytes: int
    values: dict[str, float | None]

    @property
    def staged(self) -> bool:
        """Whether all are copied."""
        return not isinstance(self.tensors, Future)

    def ready(self) -> dict[str, Tensor]:
        """The tensors, when all are copied."""
        return self.tensors.result() if isinstance(self.tensors, Future) else self.tensors


@attrs.frozen
class Shares:
    """
    Which nodes have what kind of state, and what of it this rank writes.

    Of state that is the same on all ranks rank 0 writes all; of entries that are spread over ranks each writes those
    that no rank before it holds.
    """

    replicated: list[str]
    local: list[str]
    spread: dict[str, set[str]]
    rank: int

    @classmethod
    def of(cls, states: Mapping[str, Stateful], group: Group) -> "Shares":
        """Ask the nodes; all ranks call it."""
        held = {name: names for name, node in states.items() if (names := names_of(node)) is not None}
        local = [name for name, node in states.items() if is_local(node)]
        everywhere = group.gather_json(held) if group.size > 1 else []
        spread = {name: set(names) for name, names in held.items()}
        for other in everywhere[: group.rank]:
            for name, names in other.items():
                spread[name] -= set(names)
        return cls([name for name in states if name not in (*local, *held)], local, spread, group.rank)

    def take(self, states: Mapping[str, Stateful], step: Step, stager: Stager | None = None) -> Snapshot:
        """What this rank saves; nothing of it changes afterwards, if the stager copies."""
        mine: dict[str, dict[str, Any]] = {}
        for name, node in states.items():
            if name in self.spread:
                mine[name] = {key: part for key, part in node.state_dict().items() if key in self.spread[name]}
            elif self.rank == 0 or name in self.local:
                mine[name] = node.state_dict()
        tree, tensors = pack(mine)
        count = sum(tensor.nbytes for tensor in tensors.values())
        return Snapshot(tree, tensors if stager is None else stager.stage(tensors), count, _values(step))


@attrs.frozen
class Committer:
    """Makes checkpoints. Every rank calls it, in the same order; `group` is used by nobody else meanwhile."""

    group: Group
    shares: Shares
    recipe: ResolvedRecipe
    before: Callable[[], None]
    after: Callable[[Path, Mapping[str, float | None]], None]

    def commit(self, checkpoint: Path, snapshot: Snapshot) -> None:
        """
        Write, and commit when all have written. `before` is called on the main rank before anything is committed,
        `after` when it is.

        Raises Trouble on every rank if the system fails any of them; what was committed before is untouched.
        """
        aside = Path(main_in_step(self.group, lambda: str(writing.begin(checkpoint))))
        try:
            written = in_step(self.group, lambda: self._write(aside, snapshot))
            main_in_step(self.group, lambda: self._commit(checkpoint, aside, snapshot, written))
        except Trouble:
            if self.shares.rank == 0:
                _forget(aside)
            raise
        if self.shares.rank == 0:
            self.after(checkpoint, snapshot.values)

    def _write(self, aside: Path, snapshot: Snapshot) -> dict[str, Any]:
        """Write this rank's states; file name to content, as JSON carries it."""
        written = writing.write_rank(aside, self.shares.rank, snapshot.tree, snapshot.ready())
        return {name: attrs.asdict(content) for name, content in written.items()}

    def _commit(self, checkpoint: Path, aside: Path, snapshot: Snapshot, written: list[dict[str, Any]]) -> None:
        self.before()
        contents = {name: Content(**content) for by_name in written for name, content in by_name.items()}
        contents[RECIPE] = durable_files.write_file(aside / RECIPE, self.recipe.text.encode())
        manifest = Manifest(
            step=step_of(checkpoint),
            recipe=self.recipe.hash,
            world_size=self.group.size,
            replicated=self.shares.replicated,
            local=self.shares.local,
            spread=list(self.shares.spread),
            values=snapshot.values,
            files=contents,
        )
        writing.commit(checkpoint, manifest)


def _forget(aside: Path) -> None:
    """What is left of it is swept at the next save, or the next start."""
    try:
        durable_files.remove_folder(aside)
    except OSError:
        return


def _values(step: Step) -> dict[str, float | None]:
    """The numbers that a step left behind; one that was refused has no loss."""
    numbers = {name: value for name, value in step.values.items() if type(value) in (int, float)}
    values = {name: float(value) if math.isfinite(value) else None for name, value in numbers.items()}
    return values | {"loss": None} if step.refused else values
