"""
State of the newest steps in this rank's memory, to repeat a step after the loss of other ranks.

A step's state is referenced at its end, and copied just before the next update changes it. By then, every rank has
ended the step, because ranks exchange signals after each step. So all ranks have one step in common at any time.
"""

from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor

from drawloom.components.checkpoint.snapshot import slices_by_sharded_entry
from drawloom.components.checkpoint.staging.blocking import Blocking
from drawloom.components.ports.run import Stateful
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.state.trees import map_leaves


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

    def hold(self, step: int, states: Mapping[str, Stateful]) -> None:
        """Reference the state after a step. Tensors must not change before `copy`."""
        self._current = HeldState(
            step,
            {name: map_leaves(_detach_leaf, node.state_dict()) for name, node in states.items()},
            {name: slices_by_sharded_entry(node) for name, node in states.items()},
        )

    def copy(self) -> None:
        """Copy the referenced state, if there is one, in place of the older copy."""
        if self._current is not None:
            current, self._current, self._copy = self._current, None, None
            self._copy = attrs.evolve(current, states=self._stager.stage({**current.states}))

    def states_by_step(self) -> dict[int, HeldState]:
        """Return the states in memory, one or two, by step."""
        return {state.step: state for state in (self._copy, self._current) if state is not None}

    def keep(self, state: HeldState) -> None:
        """Replace all states in memory by this one."""
        self._copy, self._current = state, None


def _detach_leaf(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
