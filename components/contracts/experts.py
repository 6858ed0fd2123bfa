"""Contracts for ports of models with experts."""

from itertools import pairwise

import torch

from drawloom.components.contracts.model import _expect_close, _random_tensor
from drawloom.graph.testing import expect
from drawloom.ports import Dispatcher

# Choices of 4 tokens among 3 experts; one choice is dropped, and expert 1 is chosen once.
CHOICES = torch.tensor([[0, 2], [1, -1], [2, 0], [2, 0]])
ENDS = [3, 4, 7]


def experts_receive_the_tokens_that_chose_them(dispatcher: Dispatcher) -> None:
    """
    The rows of an expert are the tokens that chose it, with their probabilities.

    The experts' results are added up by token, and both directions have gradients.
    """
    hidden, probabilities = _random_tensor(4, 8).requires_grad_(), _random_tensor(4, 2).requires_grad_()
    local = dispatcher.dispatch(hidden, CHOICES, probabilities, 3)
    expect(local.ends.tolist() == ENDS, f"the rows of experts end at {local.ends.tolist()}, not at {ENDS}")
    for expert, (first, last) in enumerate(pairwise([0, *ENDS])):
        tokens = hidden[CHOICES.eq(expert).any(1)]
        order = [int(torch.cdist(row[None], tokens).argmin()) for row in local.rows[first:last]]
        expect(sorted(order) == [*range(len(tokens))], f"the rows of expert {expert} are not the tokens that chose it")
        _expect_close(local.rows[first:last], tokens[order].double())
    weights = (CHOICES >= 0).double() * probabilities.double()
    expected = hidden.double() * weights.sum(1, keepdim=True)
    result = local.combine(local.rows * local.scale[:, None])
    _expect_close(result, expected)
    grads = torch.autograd.grad(result.sum(), (hidden, probabilities))
    expected_grads = torch.autograd.grad(expected.sum(), (hidden, probabilities))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        _expect_close(grad, expected_grad.double())


def without_tokens_experts_have_no_rows(dispatcher: Dispatcher) -> None:
    """Without tokens, experts have no rows, and the result has no rows."""
    local = dispatcher.dispatch(torch.zeros(0, 8), CHOICES[:0], torch.zeros(0, 2), 3)
    expect(local.ends.tolist() == [0, 0, 0], f"without tokens, the rows of experts end at {local.ends.tolist()}")
    result = local.combine(local.rows)
    expect(result.shape == (0, 8), f"without tokens, the result has the shape {tuple(result.shape)}")
