"""A snapshot of the state after a step: the part of every stateful node that this rank saves."""

import math
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import attrs
from torch import Tensor

from drawloom.components.ports.distributed import Group
from drawloom.components.ports.run import Stateful, Step
from drawloom.components.ports.staging import Stager
from drawloom.components.storage.state_tree import Tree, pack


def is_local(node: Stateful) -> bool:
    """Whether each rank has a separate state."""
    return bool(getattr(node, "state_is_local", False))


def names_of(node: Stateful) -> list[str] | None:
    """The names of the entries that this rank holds, if the state is sharded by entry over ranks; else None."""
    return list(node.state_names()) if hasattr(node, "state_names") else None


@attrs.frozen
class Snapshot:
    """A rank's part of a checkpoint: a tree, the tensors that it names, their bytes, and the step's metrics."""

    tree: Tree
    tensors: dict[str, Tensor] | Future[dict[str, Tensor]]
    bytes: int
    values: dict[str, float | None]

    @property
    def staged(self) -> bool:
        """Whether the stager has made all copies."""
        return not isinstance(self.tensors, Future)

    def ready(self) -> dict[str, Tensor]:
        """The tensors by name, of any shape and dtype; waits until all copies are made."""
        return self.tensors.result() if isinstance(self.tensors, Future) else self.tensors


@attrs.frozen
class ShardPlan:
    """
    Which part of the state this rank saves: rank 0 saves replicated state, each rank its local state.

    `sharded` has the nodes whose entries are sharded, and for each the entries that no lower rank holds: an entry that
    several ranks hold is saved once, by the lowest of them.
    """

    replicated: list[str]
    local: list[str]
    sharded: dict[str, set[str]]
    rank: int

    @classmethod
    def of(cls, states: Mapping[str, Stateful], group: Group) -> "ShardPlan":
        """Compare the nodes of all ranks; all ranks call this."""
        held = {name: names for name, node in states.items() if (names := names_of(node)) is not None}
        local = [name for name, node in states.items() if is_local(node)]
        sharded = {name: set(names) for name, names in held.items()}
        for other in group.gather_json(held)[: group.rank]:
            for name, names in other.items():
                sharded[name] -= set(names)
        return cls([name for name in states if name not in (*local, *held)], local, sharded, group.rank)

    def take(self, states: Mapping[str, Stateful], step: Step, stager: Stager | None = None) -> Snapshot:
        """This rank's part of the state; a stager copies it, so that the state may change while it is written."""
        mine: dict[str, dict[str, Any]] = {}
        for name, node in states.items():
            if name in self.sharded:
                mine[name] = {key: part for key, part in node.state_dict().items() if key in self.sharded[name]}
            elif self.rank == 0 or name in self.local:
                mine[name] = node.state_dict()
        tree, tensors = pack(mine)
        count = sum(tensor.nbytes for tensor in tensors.values())
        return Snapshot(tree, tensors if stager is None else stager.stage(tensors), count, _values(step))


def _values(step: Step) -> dict[str, float | None]:
    """The numbers among a step's outputs, None for one that is not finite; a skipped step has no loss."""
    step.settle()
    numbers = {name: value for name, value in step.outputs.items() if type(value) in (int, float)}
    values = {name: float(value) if math.isfinite(value) else None for name, value in numbers.items()}
    return values | {"loss": None} if step.skip_reason else values
