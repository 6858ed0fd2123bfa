"""Process groups with one and with several processes."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drawloom.components.distributed.process_group import TorchGroup, mark_blocked_and_convert_errors
from drawloom.components.distributed.rank_monitor import RankMonitor
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.graph import UserError
from support.processes import RanksFailedError, run_ranks

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8]


def _world() -> TorchGroup:
    dist.init_process_group("gloo")
    return TorchGroup("world", range(dist.get_world_size()), dist.group.WORLD, torch.device("cpu"))


def _reductions() -> list[tuple[str, list[float], list[float]]]:
    world = _world()
    results = []
    for dtype in DTYPES:
        total = torch.tensor([1, 2 + world.rank], dtype=dtype)
        most = total.clone()
        world.sum(total)
        world.max(most)
        results.append((str(total.dtype), total.tolist(), most.tolist()))
    return results


def _reduce_columns() -> list[list[float]]:
    world = _world()
    table = torch.arange(6.0).reshape(2, 3).requires_grad_()
    world.sum(table.data[:, 1])  # not contiguous
    world.sum(table.data[:, :0])
    world.sum(torch.zeros((), dtype=torch.float64))
    return table.tolist()


def _gather(values: list[Any]) -> list[Any]:
    world = _world()
    return world.gather_json(values[world.rank])


def _broadcast_and_gather_each() -> tuple[list[float], list[list[Any]], list[str]]:
    world = _world()
    table = torch.full((2, 3), float(world.rank))
    world.broadcast(table[:, 1], 2)  # not contiguous
    shapes = [(2, 0), (1, 3), (2, 2)]  # of which the first is empty
    parts = world.gather_unequal_shapes(torch.full(shapes[world.rank], 1 + world.rank, dtype=torch.bfloat16))
    numbers = world.gather_unequal_shapes(torch.tensor(float(world.rank)))
    return table[0].tolist(), [part.tolist() for part in (*parts, *numbers)], [str(part.dtype) for part in parts]


def _lose_a_peer() -> tuple[str, float]:
    world = _world()
    world.sum(torch.ones(1))
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        for _ in range(1000):
            world.sum(torch.ones(1))
    return str(caught.value), time.monotonic() - start


def test_reductions_keep_the_dtype() -> None:
    """Sum and maximum run over all ranks, in place, in the tensor's dtype."""
    expected = [(str(dtype), [2, 5], [1, 3]) for dtype in DTYPES]
    assert run_ranks(_reductions, 2) == [expected, expected]


def test_views_are_reduced_in_place() -> None:
    """A column of a matrix is reduced and its neighbours are unchanged; empty tensors and scalars work."""
    assert run_ranks(_reduce_columns, 2) == [[[0, 2, 2], [3, 8, 5]]] * 2


def test_ranks_gather_values_of_unequal_length() -> None:
    """Every rank has all values by rank, whatever their length and characters."""
    values = [None, {"words": "été" * 1000, "numbers": [1, 2.5, 1e-320]}, ""]
    assert run_ranks(_gather, 3, values) == [values] * 3


def test_a_rank_sends_to_all_and_ranks_gather_tensors_of_any_shape() -> None:
    """
    Rank 2's column is sent to all, and its neighbours stay; gathered tensors have their own shapes, 0 rows too. Two
    gathers may be in progress, and are awaited in any order.
    """
    expected = [[[], []], [[2.0, 2.0, 2.0]], [[3.0, 3.0], [3.0, 3.0]], 0.0, 1.0, 2.0]
    for rank, received in enumerate(run_ranks(_broadcast_and_gather_each, 3)):
        assert received == ([rank, 2.0, rank], expected, ["torch.bfloat16"] * 3)


def test_a_lost_peer_is_an_error_that_names_the_group() -> None:
    """The survivor of a killed rank raises within seconds, with the group and its ranks in the message."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_lose_a_peer, 2)
    assert list(caught.value.failures) == [1]
    text, seconds = caught.value.values[0]
    assert "group world (ranks 0, 1) failed on rank 0" in text
    assert seconds < 2


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (RuntimeError("\nconnection closed\nby peer"), UserError, "torch says: connection closed$"),
        (RuntimeError(""), UserError, r"another process stopped; see its log. torch says: RuntimeError\(''\)"),
        (torch.OutOfMemoryError("tried to allocate"), torch.OutOfMemoryError, "^tried to allocate$"),
    ],
)
def test_errors_of_torch_get_a_diagnosis_unless_memory_lacks(
    error: RuntimeError, kind: type[Exception], text: str
) -> None:
    """Any message, even an empty one, is diagnosed; no other process is blamed for a rank's lack of memory."""
    with pytest.raises(kind, match=text), mark_blocked_and_convert_errors(RankMonitor(), "a sum", "world", [0, 1]):
        raise error


def test_a_group_of_one_changes_nothing() -> None:
    """Tensors are unchanged, and a value comes back after a round trip through JSON."""
    group, tensor = SingleProcess(), torch.tensor([1.5, -2.0])
    group.sum(tensor)
    group.max(tensor)
    assert tensor.tolist() == [1.5, -2.0]
    group.broadcast(tensor, 0)
    assert torch.equal(group.gather_unequal_shapes(tensor)[0], tensor)
    assert group.gather_json({"a": (1, 2)}) == [{"a": [1, 2]}]
