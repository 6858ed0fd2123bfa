"""
States of the newest steps in this rank's memory, to continue after the loss of other ranks.

A step's state is referenced at its end, when all ranks have ended it, and copied just before the next update changes
it. So replicas have one step in common at any time, and ranks that have just joined receive the state from a replica.

Without a replica, a lost rank's part is in its neighbour's memory, with all other parts of the same step (GEMINI, SOSP
2023). New copies replace older ones only after all ranks have them.
"""

from collections.abc import Mapping

import attrs
from torch import Tensor

from drawloom.components.checkpoint.memory_exchange import HeldState, NeighbourCopy, PartKey
from drawloom.components.checkpoint.staging.blocking import Blocking
from drawloom.components.ports.checkpoint import Stateful
from drawloom.components.state.trees import map_leaves


@attrs.define(eq=False)
class StateMemory:
    """
    Memory for this rank's states after the last steps, and for a neighbour's.

    `copies_each_step` is False if a step that is only in this rank's memory would be useless.
    """

    copies_each_step: bool = True
    _stager: Blocking = attrs.field(init=False, factory=Blocking)
    _copy: HeldState | None = attrs.field(init=False, default=None)
    _current: HeldState | None = attrs.field(init=False, default=None)
    _shared: HeldState | None = attrs.field(init=False, default=None)  # of the step of the neighbours' copies
    _copies: tuple[NeighbourCopy, ...] = attrs.field(init=False, default=())  # the newest one last

    def reference_states(self, key: PartKey, nodes: Mapping[str, Stateful]) -> HeldState:
        """Reference and return the state after a step. Tensors must not change before `replace_reference_by_copy`."""
        states = {name: map_leaves(_detach_if_tensor, node.state_dict()) for name, node in nodes.items()}
        self._current = HeldState.from_nodes(key, nodes, states)
        return self._current

    def replace_reference_by_copy(self) -> None:
        """Copy the referenced state, if there is one, in place of the older copy."""
        if self._current is None:
            return
        current, self._current, self._copy = self._current, None, None
        is_shared = bool(self._copies) and self._copies[-1].key.step == current.key.step
        if is_shared:
            self._shared = None
        if is_shared or self.copies_each_step:
            self._copy = attrs.evolve(current, states=self._stager.stage({**current.states}))
        if is_shared:
            self._shared = self._copy

    def add_neighbour(self, copy: NeighbourCopy) -> None:
        """Keep a neighbour's newest state, beside an older one until `drop_older_neighbour_copies`."""
        self._copies = (*self._copies, copy)

    def drop_older_neighbour_copies(self) -> None:
        """Drop neighbours' older states. All ranks have added newer ones."""
        self._copies = self._copies[-1:]

    def list_intact_parts(self) -> dict[PartKey, HeldState | NeighbourCopy]:
        """Return the states in memory, without damaged copies; this rank's own ones come last."""
        parts: dict[PartKey, HeldState | NeighbourCopy] = {copy.key: copy for copy in self._copies if copy.is_intact()}
        return parts | {state.key: state for state in (self._shared, self._copy, self._current) if state is not None}

    def replace_newest_states(self, state: HeldState) -> None:
        """Replace this rank's newest states by this one."""
        self._copy, self._current = state, None

    def drop_older_states_and_keep_copy(self, copy: NeighbourCopy | None) -> None:
        """Replace all older states by the kept one and by a neighbour's after the same step, if it has one."""
        self._shared, self._copies = (self._copy, (copy,)) if copy else (None, ())


def _detach_if_tensor(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
