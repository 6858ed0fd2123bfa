"""Stateful nodes and a checkpointer of them, for tests in this process and in others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch

from drawloom.components.checkpoint.checkpointer import Checkpointer
from drawloom.components.distributed.process_group import SingleProcess
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.run import Event, Stateful, Step
from drawloom.components.ports.staging import Stager
from drawloom.graph import Every, ResolvedRecipe


@attrs.define
class Memory:
    """A node whose state is what it was told."""

    state: dict[str, Any] = attrs.field(factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """What it was told."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember that instead."""
        self.state = state


class OwnMemory(Memory):
    """A node of which each rank has its own."""

    state_is_local: ClassVar[bool] = True


@attrs.define
class SpreadMemory(Memory):
    """A node whose entries are spread over ranks."""

    names: list[str] | None = None

    def state_names(self) -> list[str]:
        """Those that it has, unless it was told others."""
        return list(self.state) if self.names is None else self.names


@attrs.define
class Place:
    """A folder that is there."""

    folder: Path


@attrs.define
class AloneMesh:
    """One rank in every dimension."""

    world: Group = attrs.field(factory=SingleProcess)
    replicas: Group = attrs.field(factory=SingleProcess)

    def group(self, dimension: str) -> Group:
        """This rank."""
        return SingleProcess()

    def size(self, dimension: str) -> int:
        """One."""
        return 1

    def index(self, dimension: str) -> int:
        """The first."""
        return 0


class AloneProcesses:
    """One process."""

    rank = local_rank = 0
    world_size = local_world_size = 1

    def group(self, name: str, sets: Sequence[Sequence[int]]) -> Group:
        """Itself."""
        return SingleProcess()

    def control_group(self, name: str) -> Group:
        """Itself."""
        return SingleProcess()


@attrs.define
class Diary:
    """Events, written down."""

    told: list[tuple[str, int]] = attrs.field(factory=list)

    def emit(self, event: Event) -> None:
        """Write down when it was and what."""
        self.told.append((event.kind, event.step.index if event.step else 0))


def checkpointer(folder: Path, states: Mapping[str, Stateful], mesh: Any = None, **settings: Any) -> Checkpointer:
    """An open checkpointer of these nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = settings.pop("recipe", ResolvedRecipe("format = 1\n", "hash"))
    processes: Any = getattr(mesh, "processes", AloneProcesses())
    node = Checkpointer(
        folder=Place(folder),
        mesh=mesh or AloneMesh(),
        processes=processes,
        states=Every(states),
        records=Every(settings.pop("records", {})),
        recipe=recipe,
        **settings,
    )
    node.open()
    return node


def state_of(step: int) -> dict[str, Any]:
    """A small state that differs at every step."""
    generator = torch.Generator().manual_seed(step)
    return {"weight": torch.randn(3, 4, generator=generator), "step": step, "loss": 1 / 3 + step}


def save_steps(folder: Path, *indices: int, keep: int = 100, staging: Stager | None = None) -> None:
    """Commit `state_of` each of these steps."""
    memory = Memory()
    node = checkpointer(folder, {"memory": memory}, keep=keep, staging=staging)
    for index in indices:
        memory.state = state_of(index)
        node.save(Step(index, 1000))


def restored(folder: Path) -> int:
    """The step of what is restored, after a comparison with `state_of` it; 0 if there is nothing."""
    memory = Memory()
    step = checkpointer(folder, {"memory": memory}).restore()
    if step:
        expected = state_of(step)
        weight = memory.state.pop("weight")
        if not torch.equal(weight, expected.pop("weight")) or memory.state != expected:
            raise ValueError(f"the state after step {step} is another")
    return step
