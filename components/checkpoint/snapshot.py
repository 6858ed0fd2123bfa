"""
Snapshot after a step: this rank's part of the state, from all stateful nodes.

Tensors of sharded nodes are saved as slices, one per rank.
"""

import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import attrs
from torch import Tensor

from drawloom.components.state.trees import map_leaves
from drawloom.components.storage.state_tree import PackedState, Tree, pack_state
from drawloom.ports import (
    Group,
    GrowingState,
    LocalState,
    SlicedState,
    SlicedTensor,
    Stager,
    Stateful,
    Step,
    TensorSlice,
)


def is_rank_local(node: Stateful) -> bool:
    """Return whether ranks have separate states."""
    return isinstance(node, LocalState) and node.state_is_local


def slices_by_sharded_entry(node: Stateful) -> Mapping[str, TensorSlice | None] | None:
    """Return a sharded state's entries on this rank with their slices; None if the state is not sharded."""
    return node.state_slices() if isinstance(node, SlicedState) else None


@attrs.frozen
class Snapshot:
    """
    One rank's part of a checkpoint: a tree, its named tensors, their bytes, and the step's metrics.

    `values` has None for metrics without a finite value, and for a skipped step's loss.
    """

    tree: Tree
    tensors: dict[str, Tensor] | Future[dict[str, Tensor]]
    bytes: int
    values: dict[str, float | None]


@attrs.frozen
class ShardPlan:
    """
    This rank's part of the state: rank 0 saves replicated state, every rank its local state.

    `sharded` has the sharded nodes, with the entries to save and their slices. If several ranks have the same slice of
    an entry, the lowest rank saves it.
    """

    replicated: list[str]
    local: list[str]
    sharded: dict[str, dict[str, TensorSlice | None]]
    rank: int

    @classmethod
    def compare_across_ranks(cls, states: Mapping[str, Stateful], group: Group) -> "ShardPlan":
        """Compare all ranks' nodes. A collective over all ranks."""
        slices = {
            name: entries for name, node in states.items() if (entries := slices_by_sharded_entry(node)) is not None
        }
        own = {
            name: {entry: part and [[*part.offsets], [*part.size]] for entry, part in entries.items()}
            for name, entries in slices.items()
        }
        local = [name for name, node in states.items() if is_rank_local(node)]
        earlier = group.gather_json(own)[: group.rank]
        sharded = {
            name: {
                entry: part
                for entry, part in entries.items()
                if not any((entry, own[name][entry]) in others.get(name, {}).items() for others in earlier)
            }
            for name, entries in slices.items()
        }
        return cls([name for name in states if name not in (*local, *own)], local, sharded, group.rank)

    def take_snapshot(self, states: Mapping[str, Stateful], step: Step, stager: Stager | None = None) -> Snapshot:
        """
        Return this rank's part of the state; a stager copies it, so the state may change while it is
        written.
        """
        tree, tensors = self._pack_states_of_rank({name: node.state_dict for name, node in states.items()})
        count = sum(tensor.nbytes for tensor in tensors.values())
        values = {key: number if math.isfinite(number) else None for key, number in step.state.numbers().items()}
        if values.get("skip"):
            values["loss"] = None
        return Snapshot(tree, tensors if stager is None else stager.stage(tensors), count, values)

    def forecast_bytes(self, states: Mapping[str, Stateful], growing: Mapping[str, GrowingState]) -> int:
        """Estimate this rank's checkpoint bytes once all state exists."""
        sources = {name: node.state_dict for name, node in states.items()}
        tree, tensors = self._pack_states_of_rank(
            sources | {name: node.forecast_state_after_first_step for name, node in growing.items()}
        )
        # twice the tree: it is a file, and headers of tensor files repeat its names, with shapes, dtypes and offsets
        return sum(tensor.nbytes for tensor in tensors.values()) + 2 * len(json.dumps(tree))

    def _pack_states_of_rank(self, sources: Mapping[str, Callable[[], dict[str, Any]]]) -> PackedState:
        """Pack this rank's part of the functions' states."""
        own_part: dict[str, dict[str, Any]] = {}
        for name, source in sources.items():
            if name in self.sharded:
                slices = self.sharded[name]
                own_part[name] = {
                    key: mark_slices(part, slices[key]) for key, part in source().items() if key in slices
                }
            elif self.rank == 0 or name in self.local:
                own_part[name] = source()
        return pack_state(own_part)


def mark_slices(state: Any, tensor_slice: TensorSlice | None) -> Any:
    """
    Mark an entry's tensors, which have the slice's shape, as slices; without a slice, return the state
    unchanged.
    """
    if tensor_slice is None:
        return state
    return map_leaves(
        lambda leaf: SlicedTensor(leaf, tensor_slice) if has_ndim_of_whole_tensor(leaf, tensor_slice) else leaf, state
    )


def has_ndim_of_whole_tensor(leaf: Any, tensor_slice: TensorSlice) -> bool:
    """Return whether a leaf has the dimensions of the slice's whole tensor."""
    # other tensors, such as a step counter without dimensions, are not sliced
    return isinstance(leaf, Tensor) and leaf.ndim == len(tensor_slice.shape) > 0
