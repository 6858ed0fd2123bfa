"""States of the newest steps in memory."""

from typing import Any

import attrs
import pytest
import torch

from drawloom.components.checkpoint.memory import StateMemory, find_newest_recoverable_step
from drawloom.components.ports.slices import TensorSlice


@attrs.define
class Node:
    """A stateful node with a tensor and a list."""

    weight: torch.Tensor = attrs.field(factory=lambda: torch.zeros(3))
    rows: list[int] = attrs.field(factory=list)
    slices: dict[str, TensorSlice | None] = attrs.field(factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Return references."""
        return {"weight": self.weight, "rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load."""

    def state_slices(self) -> dict[str, TensorSlice | None]:
        """Return the slices."""
        return self.slices


def _values(memory: StateMemory) -> dict[int, tuple[list[float], list[int]]]:
    states = {step: state.states["node"] for step, state in memory.states_by_step().items()}
    return {step: (state["weight"].tolist(), state["rows"]) for step, state in states.items()}


def test_an_update_changes_no_held_state() -> None:
    """Until the copy, the last two steps are held; then the newest one, as it was before the update."""
    memory, node = StateMemory(), Node()
    memory.copy_referenced_states()
    assert memory.states_by_step() == {}
    for step in (1, 2, 3):
        node.rows.append(step)
        memory.reference_states(step, {"node": node})
        assert list(memory.states_by_step()) == [step - 1, step][step == 1 :]
        memory.copy_referenced_states()
        node.weight += 1
        assert _values(memory) == {step: ([step - 1.0] * 3, list(range(1, step + 1)))}
    memory.reference_states(4, {"node": node})
    memory.replace_states_by(memory.states_by_step()[3])
    assert list(_values(memory)) == [3]


def test_a_state_of_other_nodes_or_slices_does_not_fit() -> None:
    """An optimizer before its first step has no slices, and everything fits."""
    memory, whole = StateMemory(), Node(slices={"weight": TensorSlice.whole((3,))})
    memory.reference_states(1, {"node": whole})
    state = memory.states_by_step()[1]
    other = Node(slices={"weight": TensorSlice((6,), (3,), (3,))})
    assert state.fits({"node": whole}) and state.fits({"node": Node()})
    assert not state.fits({"node": other}) and not state.fits({"other": whole})


@pytest.mark.parametrize(
    ("steps", "positions", "step"),
    [
        ([[3, 4], [4]], [[0], [0]], 4),
        ([[3, 4], [3]], [[0], [0]], 4),  # the second rank receives it from its replica
        ([[3, 4], [3]], [[0], [1]], 3),  # the second rank has another part of the model
        ([[3, 4], [3], [], [4]], [[0], [1], [0], [1]], 4),
        ([[3], []], [[0], [1]], 0),
        ([[], []], [[0], [0]], 0),
    ],
)
def test_the_newest_step_in_some_replica_of_each_position_is_found(
    steps: list[list[int]], positions: list[list[int]], step: int
) -> None:
    """It is 0 if a part of the model is in nobody's memory."""
    assert find_newest_recoverable_step(steps, positions) == step
