"""Contracts for ports of models with experts."""

from itertools import pairwise

import torch

from drawloom.components.contracts.model import _expect_close, _random_tensor
from drawloom.components.ports.experts import Dispatcher, ExpertKernels
from drawloom.graph.testing import expect


def swiglu_halves_follows_its_formula(kernels: ExpertKernels) -> None:
    """The result is swiglu of the two halves of the channels, gate first, times the scale of each row."""
    both, scale = _random_tensor(5, 16), _random_tensor(5)
    gate, up = both.double().chunk(2, -1)
    _expect_close(kernels.swiglu_halves(both), gate * gate.sigmoid() * up)
    _expect_close(kernels.swiglu_halves(both, scale), gate * gate.sigmoid() * up * scale.double()[:, None])


# Choices of 4 tokens among 3 experts; one choice is dropped, and expert 1 is chosen once.
CHOICES = torch.tensor([[0, 2], [1, -1], [2, 0], [2, 0]])
ENDS = [3, 4, 7]


def rows_are_sorted_by_expert(kernels: ExpertKernels) -> None:
    """A choice has a row in the range of its expert, with the token and the choice's probability."""
    x, probabilities = _random_tensor(4, 8), _random_tensor(4, 2)
    routes = kernels.moe_routes(CHOICES, 3)
    expect(routes[2].tolist() == ENDS, f"the rows of experts end at {routes[2].tolist()}, not at {ENDS}")
    rows, chances = kernels.moe_permute(x, probabilities, routes)
    for token, choice in (CHOICES >= 0).nonzero().tolist():
        row, expert = int(routes[0][token, choice]), int(CHOICES[token, choice])
        expect([0, *ENDS][expert] <= row < ENDS[expert], f"a choice of expert {expert} has row {row}")
        _expect_close(rows[row], x[token])
        _expect_close(chances[row], probabilities[token, choice])


def rows_are_summed_by_token(kernels: ExpertKernels) -> None:
    """The result for a token is the sum of its choices' rows, times probabilities if given; dropped choices add 0."""
    x, probabilities = _random_tensor(4, 8), _random_tensor(4, 2)
    routes = kernels.moe_routes(CHOICES, 3)
    rows, _ = kernels.moe_permute(x, probabilities, routes)
    chosen = (CHOICES >= 0).double()
    _expect_close(kernels.moe_unpermute(rows, routes), x.double() * chosen.sum(1, keepdim=True))
    weights = (chosen * probabilities.double()).sum(1, keepdim=True)
    _expect_close(kernels.moe_unpermute(rows, routes, probabilities), x.double() * weights)


def a_dropped_choice_needs_no_row(kernels: ExpertKernels) -> None:
    """Routes that end after the choices that are not dropped produce and add exactly as many rows."""
    x, probabilities = _random_tensor(4, 8), _random_tensor(4, 2)
    dest, source, ends = kernels.moe_routes(CHOICES, 3)
    routes = dest, source[: ENDS[-1]], ends
    rows, scale = kernels.moe_permute(x, probabilities, routes)
    expect((len(rows), len(scale)) == (ENDS[-1], ENDS[-1]), f"of {ENDS[-1]} choices, {len(rows)} rows are made")
    weights = ((CHOICES >= 0).double() * probabilities.double()).sum(1, keepdim=True)
    _expect_close(kernels.moe_unpermute(rows * scale[:, None], routes), x.double() * weights)


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


def rows_are_multiplied_by_their_experts_matrix(kernels: ExpertKernels) -> None:
    """A row is multiplied by the matrix of its expert, or by the transposed matrix; an expert may have no rows."""
    weight, offsets = _random_tensor(3, 8, 16), torch.tensor([2, 2, 5], dtype=torch.int32)
    expert_of_row = torch.tensor([0, 0, 2, 2, 2])
    for x, transposed in ((_random_tensor(5, 8), False), (_random_tensor(5, 16), True)):
        matrices = weight.double()[expert_of_row]
        wanted = torch.einsum("ri,roi->ro" if transposed else "ri,rio->ro", x.double(), matrices)
        _expect_close(kernels.grouped_gemm(x, weight, offsets, transposed), wanted)
