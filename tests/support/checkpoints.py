"""Stateful nodes and a checkpointer for them, for tests in this process and in subprocesses."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch

from drawloom.components.checkpoint.checkpointer import Checkpointer
from drawloom.components.distributed.mesh_layout import MeshView
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.ports.checkpoint import Stager, Stateful
from drawloom.components.ports.distributed import Group, PerDimension
from drawloom.components.ports.run import Step
from drawloom.components.ports.slices import TensorSlice
from drawloom.graph import Every, ResolvedRecipe
from support.doubles import Machine


@attrs.define
class StateNode:
    """A node whose state is set by the test."""

    state: dict[str, Any] = attrs.field(factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class LocalNode(StateNode):
    """A node with a separate state on each rank."""

    state_is_local: ClassVar[bool] = True


@attrs.define
class ShardedNode(StateNode):
    """A node whose entries are sharded over ranks."""

    names: list[str] | None = None

    def state_slices(self) -> dict[str, TensorSlice | None]:
        """Return no slice for each entry of the state, or for `names` if set."""
        return dict.fromkeys(self.state if self.names is None else self.names)


@attrs.define
class FixedFolder:
    """A RunFolder at a given path."""

    folder: Path


@attrs.define
class SingleRankMesh(MeshView):
    """A mesh of one rank in every dimension."""

    world: Group = attrs.field(factory=SingleProcess)
    replica_group: Group = attrs.field(factory=SingleProcess)

    def group(self, *dimensions: str) -> Group:
        """Return a group of one rank, or with replicas the given group."""
        return self.replica_group if "data_replicate" in dimensions else SingleProcess()

    def create_torch_mesh(self, *dimensions: Sequence[str]) -> Any:
        """Return None: nothing is sharded."""
        raise AssertionError

    @property
    def sizes(self) -> PerDimension:
        """Return size 1 along every dimension."""
        return PerDimension()

    @property
    def indices(self) -> PerDimension:
        """Return index 0 along every dimension."""
        return PerDimension.of_first_rank()


class SingleRankProcesses:
    """A launch of one process."""

    rank = node_rank = 0
    world_size = node_count = 1
    survives_rank_losses = False

    def make_group(self, name: str, rank_sets: Sequence[Sequence[int]]) -> Group:
        """Return a group of one rank."""
        return SingleProcess()

    def make_control_group(self, name: str) -> Group:
        """Return a group of one rank."""
        return SingleProcess()


def checkpointer(folder: Path, states: Mapping[str, Stateful], mesh: Any = None, **settings: Any) -> Checkpointer:
    """Return an open checkpointer of these nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = settings.pop("recipe", ResolvedRecipe("format = 1\n", "hash"))
    grown: Any = states
    processes: Any = getattr(mesh, "processes", SingleRankProcesses())
    node = Checkpointer(
        folder=FixedFolder(folder),
        mesh=mesh or SingleRankMesh(),
        device=Machine(),
        processes=processes,
        states=Every(states),
        growing=Every({name: node for name, node in grown.items() if hasattr(node, "forecast_state_after_first_step")}),
        records=Every(settings.pop("records", {})),
        recipe=recipe,
        **settings,
    )
    node.open()
    return node


def state_of(step: int) -> dict[str, Any]:
    """Return a small state, different at every step."""
    generator = torch.Generator().manual_seed(step)
    return {"weight": torch.randn(3, 4, generator=generator), "step": step, "loss": 1 / 3 + step}


def save_steps(folder: Path, *indices: int, keep: int = 100, staging: Stager | None = None, **outputs: float) -> None:
    """Commit a checkpoint of `state_of(step)` for each step, with these outputs."""
    memory = StateNode()
    node = checkpointer(folder, {"memory": memory}, keep=keep, staging=staging)
    for index in indices:
        memory.state = state_of(index)
        node.save(Step(index, 1000, dict(outputs)))


def restore_step(folder: Path) -> int:
    """Restore, compare with `state_of(step)`, and return the step, 0 if there is no checkpoint."""
    memory = StateNode()
    step = checkpointer(folder, {"memory": memory}).restore()
    if step:
        expected = state_of(step)
        weight = memory.state.pop("weight")
        if not torch.equal(weight, expected.pop("weight")) or memory.state != expected:
            raise ValueError(f"the state of step {step} differs")
    return step
