"""Multi-hot tables of expert choices, against values written out by hand."""

import torch

from drawloom.kernels.moe import indices_to_multihot_eager


def test_sets_what_is_chosen() -> None:
    """Each choice is set with its probability, those of one expert add up, and dropped choices set nothing."""
    expert_indices = torch.tensor([[2, 0, -1], [1, 1, 3], [-1, -1, -1]])
    probabilities = torch.tensor([[0.5, 0.25, 9.0], [0.125, 0.5, 0.25], [1.0, 1.0, 1.0]], requires_grad=True)
    chosen, spread = indices_to_multihot_eager(expert_indices, probabilities, 4)
    assert chosen.tolist() == [[True, False, True, False], [False, True, False, True], [False] * 4]
    assert spread.tolist() == [[0.25, 0, 0.5, 0], [0, 0.625, 0, 0.25], [0, 0, 0, 0]]
    grad = torch.arange(12.0).view(3, 4)
    (found,) = torch.autograd.grad(spread, probabilities, grad)
    assert found.tolist() == [[2, 0, 0], [5, 5, 7], [0, 0, 0]]


def test_no_tokens() -> None:
    """Without tokens the table has no rows."""
    chosen, spread = indices_to_multihot_eager(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2), 3)
    assert chosen.shape == spread.shape == (0, 3)
