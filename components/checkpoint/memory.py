"""
State of the newest steps in this rank's memory, to repeat a step after the loss of other ranks.

A step's state is referenced at its end, when all ranks have ended it, and copied just before the next update changes
it. So all ranks have one step in common at any time. Ranks that have just joined have none: they receive the state from
a replica.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.checkpoint.snapshot import is_rank_local, slices_by_sharded_entry
from drawloom.components.checkpoint.staging.blocking import Blocking
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.run import Stateful
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.state.trees import map_leaves
from drawloom.components.storage.state_tree import pack_state, unpack_state


@attrs.frozen
class HeldState:
    """All stateful nodes' states on this rank after a step, and the slices of sharded nodes."""

    step: int
    states: Mapping[str, Any]
    slices: Mapping[str, Mapping[str, TensorSlice | None] | None]

    def fits(self, states: Mapping[str, Stateful]) -> bool:
        """Return whether the nodes are the same, with slices of the same parameters."""
        if states.keys() != self.states.keys():
            return False
        # an optimizer has no slices before its first step
        return all(
            not (now := slices_by_sharded_entry(node)) or now == self.slices[name] for name, node in states.items()
        )


@attrs.define(eq=False)
class StateMemory:
    """Memory for the states of up to two steps: a copy, and references to the newest state until it changes."""

    _stager: Blocking = attrs.field(init=False, factory=Blocking)
    _copy: HeldState | None = attrs.field(init=False, default=None)
    _current: HeldState | None = attrs.field(init=False, default=None)

    def reference_states(self, step: int, states: Mapping[str, Stateful]) -> None:
        """Reference the state after a step. Tensors must not change before `copy_referenced_states`."""
        self._current = HeldState(
            step,
            {name: map_leaves(_detach_leaf, node.state_dict()) for name, node in states.items()},
            {name: slices_by_sharded_entry(node) for name, node in states.items()},
        )

    def copy_referenced_states(self) -> None:
        """Copy the referenced state, if there is one, in place of the older copy."""
        if self._current is not None:
            current, self._current, self._copy = self._current, None, None
            self._copy = attrs.evolve(current, states=self._stager.stage({**current.states}))

    def states_by_step(self) -> dict[int, HeldState]:
        """Return the states in memory, one or two, by step."""
        return {state.step: state for state in (self._copy, self._current) if state is not None}

    def replace_states_by(self, state: HeldState) -> None:
        """Replace all states in memory by this one."""
        self._copy, self._current = state, None


def find_newest_recoverable_step(steps: Sequence[Sequence[int]], positions: Sequence[Any]) -> int:
    """
    Return the newest step in some rank's memory at each position in a replica, 0 without any.

    `steps` are the steps in memory, and `positions` the positions, both by rank; replicas have equal states.
    """
    by_position: dict[Any, set[int]] = {}
    for own, position in zip(steps, map(tuple, positions), strict=True):
        by_position.setdefault(position, set()).update(own)
    return max(set.intersection(*by_position.values()), default=0)


def broadcast_states(
    states: Mapping[str, Any] | None, nodes: Mapping[str, Stateful], replicas: Group
) -> dict[str, Any]:
    """
    Return all nodes' states, sent by a rank that has them, without states that differ by rank.

    `states` are this rank's, by node, or None. All ranks in `replicas` call this, and one of them has states.
    """
    own = (
        None
        if states is None
        else pack_state({name: states[name] for name, node in nodes.items() if not is_rank_local(node)})
    )
    if own is not None:
        shapes = [[name, str(leaf.dtype).removeprefix("torch."), [*leaf.shape]] for name, leaf in own.tensors.items()]
    trees = replicas.gather_json(None if own is None else [own.tree, shapes])
    source = next(rank for rank, tree in enumerate(trees) if tree is not None)
    tree, shapes = trees[source]
    tensors: dict[str, Tensor] = {}
    for name, dtype, shape in shapes:
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype)) if own is None else own.tensors[name]
        data = tensors[name].contiguous()
        replicas.broadcast(data.view(-1).view(torch.uint8), source)
    received: dict[str, Any] = unpack_state(tree, tensors)
    return received


def _detach_leaf(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
