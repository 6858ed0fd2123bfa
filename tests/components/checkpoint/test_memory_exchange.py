"""Copies of states in neighbours' memory, and states assembled from other ranks' memory."""

from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.checkpoint import memory_exchange
from drawloom.components.checkpoint.memory_exchange import (
    HeldState,
    PartKey,
    exchange_and_assemble_states,
    exchange_copies_with_neighbours,
    find_newest_complete,
)
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.slices import TensorSlice, divide_into_shares
from support.checkpoints import LocalNode, StateNode
from support.mutations import put
from support.processes import run_ranks

WHOLE = torch.arange(14.0).view(7, 2)
STEPS = torch.tensor(5)


@attrs.define
class Shard:
    """An optimizer's moments for these rows of a matrix, whose whole state is known."""

    rows: range
    loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the moments, one of them in another dtype, and a step counter; and a buffer that no rank shards."""
        mean = WHOLE[self.rows.start : self.rows.stop].clone()
        matrix = {"mean": mean, "square": (mean * 2).to(torch.bfloat16), "steps": STEPS.clone(), "name": "matrix"}
        return {"matrix": matrix, "buffer": torch.full((2,), 3.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state."""
        self.loaded = state

    def state_slices(self) -> dict[str, TensorSlice | None]:
        """Return the rows as a slice."""
        return {"matrix": TensorSlice((7, 2), (self.rows.start, 0), (len(self.rows), 2)), "buffer": None}


def _nodes(rows: range, rank: int) -> dict[str, Any]:
    return {
        "optimizer": Shard(rows),
        "counter": StateNode({"step": 5, "sum": torch.ones(3)}),
        "own": LocalNode({"a": rank}),
    }


def _lose(lost: int, starts: list[int], ends: list[int]) -> tuple[dict[str, Any], list[int], int]:
    """Copy thirds of the state, forget those of `lost`, and return this rank's state with other rows."""
    put(memory_exchange, "ROUND", 20)  # bytes: many rounds
    sent = [0]
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=20)
    processes.open()
    try:
        group = processes.make_group("world", [[0, 1, 2]])
        rank = group.rank
        nodes = _nodes(divide_into_shares(7, 3)[rank], rank)
        states = {name: node.state_dict() for name, node in nodes.items()}
        state = HeldState.from_nodes(PartKey(5, (1, 3, 1), (0, rank, 0)), nodes, states)
        copy = exchange_copies_with_neighbours(group, [2, 0, 1], state)
        assert copy.is_intact() and copy.key.indices[1] == (rank - 1) % 3
        own = {} if rank == lost else {part.key: part.pack() for part in (copy, state)}
        offers = group.gather_json([attrs.asdict(key) for key in own])
        sources = find_newest_complete([[PartKey(**key) for key in keys] for keys in offers])
        nodes = _nodes(range(starts[rank], ends[rank]), rank)
        count_rows(group, sent)
        return exchange_and_assemble_states(group, nodes, sources, own), sorted(sources.values()), sent[0]
    finally:
        processes.close()


def count_rows(group: Group, sent: list[int]) -> None:
    """Add this rank's sent bytes to `sent`."""
    exchange = group.all_to_all

    def counted(rows: Tensor, sizes: Any, received: Any) -> Tensor:
        sent[0] += sum(sizes)
        return exchange(rows, sizes, received)

    put(group, "all_to_all", counted)


def test_a_lost_shard_is_assembled_for_any_rows_from_its_copy() -> None:
    """
    Rank 1 is lost, and its copy is on rank 2. Three ranks with other rows get every value and no more than they need.

    Row ranges: all, the last two (which rank 2 has), and four over all three shards.
    """
    starts, ends = [0, 5, 2], [7, 7, 6]
    results = run_ranks(_lose, 3, 1, starts, ends)
    for (states, sources, _), start, end in zip(results, starts, ends, strict=True):
        matrix, mean = states["optimizer"]["matrix"], WHOLE[start:end]
        assert torch.equal(matrix["mean"], mean) and torch.equal(matrix["square"], (mean * 2).to(torch.bfloat16))
        assert torch.equal(matrix["steps"], STEPS) and matrix["name"] == "matrix"
        assert torch.equal(states["optimizer"]["buffer"], torch.full((2,), 3.0))
        assert states["counter"]["step"] == 5 and torch.equal(states["counter"]["sum"], torch.ones(3))
        assert "own" not in states and sources == [0, 0, 2]
    # rank 0 sends row 2 to rank 2, and all but a shard to rank 1; rank 2 sends the lost rows 3 and 4 to rank 0
    row, step, whole = 2 * 4 + 2 * 2, 8, 8 + 12
    from_0 = (2 * row + step + whole) + (row + step)
    from_2 = 2 * row + step
    assert [sent for _, _, sent in results] == [from_0, 0, from_2]
