"""Sums over token rows shared by ranks; tests/meshes compares whole models."""

import pytest
import torch
from torch import Tensor

from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.parallel.row_sums import RowSums, set_context_group
from drawloom.components.parallel.tensor_ranks import TensorRanks

ROWS, LENGTH, EXPERTS = 3, 6, 4


class Recorder(SingleProcess):
    """A rank among several, which adds up all contributions by hand."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.given: list[Tensor] = []

    def sum(self, tensor: Tensor) -> None:
        """Record this rank's contribution."""
        self.given.append(tensor.clone())


@pytest.mark.parametrize("contexts", [1, 2, 3])
@pytest.mark.parametrize("tensors", [1, 2, 4])
def test_parts_of_all_ranks_add_up_to_whole_rows(contexts: int, tensors: int) -> None:
    """
    Counts and weights belong to whole rows, however context and tensor ranks divide and pad their tokens. A row's
    padding, in which ranks may begin and end, counts nothing.
    """
    torch.manual_seed(contexts + 10 * tensors)
    chosen, weights = torch.randint(0, EXPERTS, (ROWS, LENGTH, 2)), torch.rand(ROWS, LENGTH)
    values = torch.rand(ROWS, EXPERTS)
    is_token = (torch.arange(LENGTH) < torch.tensor([[LENGTH - number * 5 % LENGTH] for number in range(ROWS)])).float()
    counts, sums, seen = torch.zeros(ROWS, EXPERTS), torch.zeros(ROWS, dtype=torch.float64), 0
    for context in range(contexts):
        part = slice(context * LENGTH // contexts, (context + 1) * LENGTH // contexts)
        mine, own = chosen[:, part].flatten(0, 1), weights[:, part]
        rank_tokens = -(-len(mine) // tensors)
        for rank in range(tensors):
            module, peers = RowSums(), Recorder(context, contexts)
            set_context_group(module, peers)
            module.ranks = TensorRanks(Recorder(rank, tensors))
            tokens = mine[rank * rank_tokens : (rank + 1) * rank_tokens]
            real = len(tokens)
            tokens = torch.cat([tokens, tokens.new_zeros(rank_tokens - real, 2)])
            given = tokens if tensors > 1 else chosen[:, part]
            is_own_token = module.select_own_token_weights(is_token[:, part])
            counts += module.count_row_choices_over_ranks(given, own, EXPERTS, is_own_token)
            sums += module.sum_row_weights(own) / tensors
            assert len(peers.given) == 2
            spread, of_each = module.repeat_by_token(values, own), module.select_own_token_weights(own).flatten()
            assert torch.equal(of_each[:real], own.flatten()[rank * rank_tokens : rank * rank_tokens + real])
            assert not of_each[real:].any() and len(module.remove_padding(tokens, own)) == real
            expected = values.repeat_interleave(own.shape[1], 0)[rank * rank_tokens : rank * rank_tokens + real]
            if tensors > 1:
                assert torch.equal(spread[:real], expected) and not spread[real:].any()
            else:
                assert torch.equal(spread.expand(ROWS, own.shape[1], EXPERTS).flatten(0, 1), expected)
            seen += real
    assert seen == ROWS * LENGTH
    expected = torch.stack(
        [row[real.bool()].flatten().bincount(minlength=EXPERTS) for row, real in zip(chosen, is_token, strict=True)]
    )
    assert torch.equal(counts, expected.float())
    torch.testing.assert_close(sums, weights.double().sum(1), rtol=1e-14, atol=0.0)


def test_rows_without_tokens_have_counts_of_zero() -> None:
    """Rows of length 0, and no rows, are no error."""
    for shape in ((2, 0), (0, 3)):
        counts = RowSums().count_row_choices_over_ranks(
            torch.zeros(*shape, 2, dtype=torch.int64), torch.empty(shape), EXPERTS
        )
        assert counts.shape == (shape[0], EXPERTS) and not counts.any()
