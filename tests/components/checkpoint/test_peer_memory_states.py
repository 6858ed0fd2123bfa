"""States of the newest steps in memory."""

from typing import Any

import attrs
import pytest
import torch

from drawloom.components.checkpoint.memory_exchange import (
    HeldState,
    NeighbourCopy,
    PartKey,
    compute_digest,
    find_newest_complete,
)
from drawloom.components.checkpoint.peer_memory import StateMemory
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


def key(step: int, index: int = 0, shards: int = 1) -> PartKey:
    """Return a shard's key."""
    return PartKey(step, (1, shards, 1), (0, index, 0))


def _own(memory: StateMemory) -> dict[int, tuple[list[float], list[int]]]:
    own = [part for part in memory.list_intact_parts().values() if isinstance(part, HeldState)]
    states = {part.key.step: part.states["node"] for part in own}
    return {step: (state["weight"].tolist(), state["rows"]) for step, state in states.items()}


def test_an_update_changes_no_held_state() -> None:
    """Until the copy, the last two steps are held; then the newest one, as it was before the update."""
    memory, node = StateMemory(), Node()
    memory.replace_reference_by_copy()
    assert not memory.list_intact_parts()
    for step in (1, 2, 3):
        node.rows.append(step)
        memory.reference_states(key(step), {"node": node})
        assert [*_own(memory)] == [step - 1, step][step == 1 :]
        memory.replace_reference_by_copy()
        node.weight += 1
        assert _own(memory) == {step: ([step - 1.0] * 3, list(range(1, step + 1)))}
    memory.reference_states(key(4), {"node": node})
    kept = memory.list_intact_parts()[key(3)]
    assert isinstance(kept, HeldState)
    memory.replace_newest_states(kept)
    assert [*_own(memory)] == [3]


@pytest.mark.parametrize("copies_each_step", [True, False])
def test_the_own_state_of_the_neighbours_step_is_kept(copies_each_step: bool) -> None:
    """It stays until newer copies are everywhere; then both older states are dropped."""
    memory, node = StateMemory(copies_each_step), Node()
    for step in range(1, 8):
        node.rows.append(step)
        state = memory.reference_states(key(step, 0, 2), {"node": node})
        if step % 3 == 0:
            memory.add_neighbour(_copy(attrs.evolve(state, key=key(step, 1, 2))))
            assert {step, max(step - 3, 3)} <= {part.step for part in memory.list_intact_parts() if part.indices[1]}
            assert step == 3 or memory.list_intact_parts()[key(step - 3, 0, 2)]
        memory.drop_older_neighbour_copies()
        memory.replace_reference_by_copy()
        node.weight += 1
        shared = step // 3 * 3
        assert [*_own(memory)] == [part for part in (shared, step) if part and (copies_each_step or part == shared)][
            shared == step :
        ]
        assert not shared or _own(memory)[shared][0] == [shared - 1.0] * 3
        assert [part.step for part in memory.list_intact_parts() if part.indices[1]] == [shared] * (shared > 0)


def _copy(state: HeldState) -> NeighbourCopy:
    packed = state.pack()
    tensors = {name: tensor.clone() for name, tensor in packed.tensors.items()}
    return NeighbourCopy(state.key, packed._replace(tensors=tensors), compute_digest(tensors.values()))


def test_a_damaged_copy_is_not_offered() -> None:
    """A single flipped bit in a neighbour's state is found by its digest."""
    memory = StateMemory()
    copy = _copy(HeldState.from_nodes(key(1, 1, 2), {"node": Node()}, {"node": Node().state_dict()}))
    memory.add_neighbour(copy)
    assert [*memory.list_intact_parts()] == [key(1, 1, 2)]
    [tensor] = copy.packed.tensors.values()
    tensor.view(torch.int32)[1] ^= 1
    assert not memory.list_intact_parts()


@pytest.mark.parametrize(
    ("offers", "step"),
    [
        ([[(3, 0), (4, 0)], [(4, 0)]], 4),
        ([[(3, 0), (4, 0)], [(3, 0)]], 4),  # the second rank receives it from its replica
        ([[], []], 0),
    ],
)
def test_replicas_have_the_newest_step_of_any(offers: list[list[tuple[int, int]]], step: int) -> None:
    """It is 0 if nobody has a state."""
    parts = find_newest_complete([[key(*part) for part in own] for own in offers])
    assert {part.step for part in parts} == ({step} if step else set())


@pytest.mark.parametrize(
    ("offers", "sources"),
    [
        ([[(4, 0), (5, 0)], [(4, 1)]], {(4, 0): 0, (4, 1): 1}),  # both shards have step 4
        ([[(4, 0), (4, 2)], [], [(4, 2), (4, 1)]], None),  # of three shards
        ([[(5, 0)], []], {}),
        ([[(4, 0), (4, 1), (6, 0)]], {(4, 0): 0, (4, 1): 0}),  # the other shard is a copy
    ],
)
def test_a_step_needs_all_shards(
    offers: list[list[tuple[int, int]]], sources: dict[tuple[int, int], int] | None
) -> None:
    """Each shard comes from the first rank that has it, and a step of another mesh does not help."""
    shards = 3 if sources is None else 2
    expected = {(4, 0): 0, (4, 2): 0, (4, 1): 2} if sources is None else sources
    other = [PartKey(7, (1, 9, 1), (0, 0, 0))]
    parts = find_newest_complete([[key(*part, shards) for part in own] + other for own in offers])
    assert parts == {key(*part, shards): rank for part, rank in expected.items()}
