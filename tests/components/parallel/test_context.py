"""Rows partitioned over ranks (context parallelism)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.parallel.context_part import ContextPart
from drawloom.components.ports.data import TokenBatch
from drawloom.graph import UserError
from support.clips import clips
from support.doubles import SilentRank
from support.processes import run_ranks


@pytest.mark.parametrize(("length", "size"), [(16, 2), (24, 4), (6, 2), (12, 4)])
def test_each_token_is_on_one_rank_and_all_have_as_many_to_attend_to(length: int, size: int) -> None:
    """The parts make up the row; where rows divide into pieces for both ends, ranks see as many earlier tokens."""
    parts = [ContextPart.for_rank(length, SilentRank(rank, size)) for rank in range(size)]
    places = torch.cat([part.token_indices for part in parts])
    assert places.sort().values.tolist() == list(range(length))
    assert torch.equal(_arrange(parts[0], places), torch.arange(length))
    if length % (2 * size) == 0:
        assert len({int(part.token_indices.sum()) for part in parts}) == 1


def test_a_row_that_does_not_divide_is_refused() -> None:
    """The message has the length and a remedy."""
    with pytest.raises(UserError, match=r"rows of 9 tokens .* mesh\.context = 2 .* multiple of 2, or better of 4"):
        ContextPart.for_rank(9, SilentRank(0, 2))


def test_a_batch_is_cut_in_all_of_its_tensors() -> None:
    """Tokens, targets, positions, documents and weights of this rank's places."""
    numbers = torch.arange(16).view(2, 8)
    batch = TokenBatch(numbers, numbers + 1, numbers % 8, numbers // 8, numbers.float())
    cut = ContextPart.for_rank(8, SilentRank(1, 2)).select_own_tokens(batch)
    assert cut.positions.tolist() == [[2, 3, 4, 5]] * 2
    assert cut.weights.tolist() == [[2.0, 3.0, 4.0, 5.0], [10.0, 11.0, 12.0, 13.0]]


def test_own_leaves_are_cut_by_their_specs() -> None:
    """A row's frames are partitioned; a row's single values, and values shared by all rows, are on all ranks."""
    whole = clips()
    part = ContextPart.for_rank(6, SilentRank(1, 3)).select_own_tokens(whole)
    assert part.frames["left"].tolist() == [[6 * row + 1, 6 * row + 4] for row in range(4)]
    assert part.frames["right"].shape == (4, 2, 2) and part.labels is whole.labels and part.scale is whole.scale


def _arrange(part: ContextPart, places: Tensor) -> Tensor:
    """Return all ranks' places in the order of the row's pieces."""
    by_rank = places.view(part.group.size, len(part.piece_indices), -1)
    return torch.cat([by_rank[piece] for piece in part.list_piece_owners()])


def _gather_rows() -> tuple[Any, ...]:
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=30.0)
    processes.open()
    try:
        mesh = RankMesh(processes=processes, context=processes.world_size, data_replicate=1)
        mesh.open()
        part = ContextPart.for_rank(8, mesh.context_group)
        mine: Tensor = part.token_indices.double()[None, :, None].requires_grad_()
        rows = part.gather(mine)
        (rows.flatten() * torch.arange(8) * (1 + mesh.world.rank)).sum().backward()  # type: ignore[no-untyped-call]
        assert mine.grad is not None
        wait = part.start_gathering_others(mine.detach())
        others = wait()
        wait = part.start_summing_for_owners(others * (1 + mesh.world.rank))
        return tuple(x.flatten().tolist() for x in (rows, mine.grad, others, wait()))
    finally:
        processes.close()


def test_gathered_rows_are_in_order_and_gradients_sum_over_ranks() -> None:
    """All ranks have the whole row; a token's gradient, on its own rank, is the sum over all ranks' uses."""
    (first, grad, *_), (second, other, *_) = exchanged = run_ranks(_gather_rows, 2)
    assert first == second == list(range(8))
    assert grad == [3.0 * position for position in (0, 1, 6, 7)] and other == [
        3.0 * position for position in (2, 3, 4, 5)
    ]
    # what is gathered from others alone is in order too, and returns to its owner
    assert [ranks[2] for ranks in exchanged] == [[2, 3, 4, 5], [0, 1, 6, 7]]
    assert [ranks[3] for ranks in exchanged] == [[2.0 * position for position in (0, 1, 6, 7)], [2, 3, 4, 5]]
