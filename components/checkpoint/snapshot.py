"""A snapshot of the state after a step: the part of every stateful node that this rank saves."""

import math
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import attrs
from torch import Tensor

from drawloom.components.checkpoint.slices import mark
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.run import Stateful, Step
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.staging import Stager
from drawloom.components.storage.state_tree import Tree, pack


def is_local(node: Stateful) -> bool:
    """Whether each rank has a separate state."""
    return bool(getattr(node, "state_is_local", False))


def slices_of(node: Stateful) -> Mapping[str, TensorSlice | None] | None:
    """The entries that this rank holds, each with its slice, if the state is sharded over ranks; else None."""
    slices: Mapping[str, TensorSlice | None] | None = node.state_slices() if hasattr(node, "state_slices") else None
    return slices


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

    `sharded` has the nodes whose entries are sharded, and for each the entries of which no lower rank holds the same
    slice: what several ranks hold is saved once, by the lowest of them.
    """

    replicated: list[str]
    local: list[str]
    sharded: dict[str, set[str]]
    rank: int

    @classmethod
    def of(cls, states: Mapping[str, Stateful], group: Group) -> "ShardPlan":
        """Compare the nodes of all ranks; all ranks call this."""
        slices = {name: found for name, node in states.items() if (found := slices_of(node)) is not None}
        held = {name: {entry: _as_json(place) for entry, place in found.items()} for name, found in slices.items()}
        local = [name for name, node in states.items() if is_local(node)]
        earlier = group.gather_json(held)[: group.rank]
        sharded = {
            name: {
                entry for entry, place in found.items() if not any(_has(name, entry, place, each) for each in earlier)
            }
            for name, found in held.items()
        }
        return cls([name for name in states if name not in (*local, *held)], local, sharded, group.rank)

    def take(self, states: Mapping[str, Stateful], step: Step, stager: Stager | None = None) -> Snapshot:
        """This rank's part of the state; a stager copies it, so that the state may change while it is written."""
        mine: dict[str, dict[str, Any]] = {}
        for name, node in states.items():
            if name in self.sharded:
                places = slices_of(node) or {}
                entries = {key: part for key, part in node.state_dict().items() if key in self.sharded[name]}
                mine[name] = {key: mark(part, places[key]) for key, part in entries.items()}
            elif self.rank == 0 or name in self.local:
                mine[name] = node.state_dict()
        tree, tensors = pack(mine)
        count = sum(tensor.nbytes for tensor in tensors.values())
        return Snapshot(tree, tensors if stager is None else stager.stage(tensors), count, _values(step))


def _as_json(place: TensorSlice | None) -> list[list[int]] | None:
    return None if place is None else [[*place.offsets], [*place.size]]


def _has(node: str, entry: str, place: list[list[int]] | None, held: Mapping[str, Any]) -> bool:
    """Whether a rank that holds these entries has a slice of one of them."""
    return entry in held.get(node, {}) and held[node][entry] == place


def _values(step: Step) -> dict[str, float | None]:
    """The numbers among a step's outputs, None for one that is not finite; a skipped step has no loss."""
    step.settle()
    numbers = {name: value for name, value in step.outputs.items() if type(value) in (int, float)}
    values = {name: float(value) if math.isfinite(value) else None for name, value in numbers.items()}
    return values | {"loss": None} if step.skip_reason else values
