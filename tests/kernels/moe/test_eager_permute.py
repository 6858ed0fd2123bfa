"""Token permutations against loops over tokens."""

import pytest
import torch
from torch import Tensor

from drawloom.kernels.moe.eager import moe_permute_eager, moe_routes_eager, moe_unpermute_eager
from drawloom.kernels.results import Routes


def case(tokens: int = 7, choices: int = 3, experts: int = 4, width: int = 5) -> tuple[Tensor, Tensor, Routes]:
    expert_indices = torch.randint(-1, experts, (tokens, choices))
    x = torch.randn(tokens, width, dtype=torch.float64, requires_grad=True)
    probabilities = torch.rand(tokens, choices, dtype=torch.float64, requires_grad=True)
    return x, probabilities, moe_routes_eager(expert_indices, experts)


def test_each_choice_has_its_row() -> None:
    """The row of a choice has its token and its probability; unused rows are zero."""
    x, probabilities, routes = case()
    rows, row_scalars = moe_permute_eager(x, probabilities, routes)
    assert rows.shape == (21, 5)
    for token in range(7):
        for choice in range(3):
            row = routes.dest_row[token, choice]
            if row >= 0:
                assert torch.equal(rows[row], x[token])
                assert row_scalars[row] == probabilities[token, choice]
    used = int(routes.offsets[-1])
    assert used < 21
    assert not rows[used:].any() and not row_scalars[used:].any()


@pytest.mark.parametrize("choice", [0, -1])
def test_rows_that_no_choice_has_can_be_cut_off(choice: int) -> None:
    """Without routes of unused rows, even without any routes, results and gradients are the same."""
    actual = []
    for cut in (False, True):
        x = torch.arange(8.0).view(4, 2).requires_grad_()
        probabilities = torch.arange(8.0).view(4, 2).requires_grad_()
        routes = moe_routes_eager(torch.tensor([[choice, -1], [-1, choice], [-1, -1], [-1, -1]]), 1)
        if cut:
            routes = routes._replace(source_choice=routes.source_choice[: int(routes.offsets[-1])])
        rows, scale = moe_permute_eager(x, probabilities, routes)
        assert len(rows) == len(scale) == len(routes.source_choice)
        summed = moe_unpermute_eager(rows * scale.unsqueeze(1), routes)
        actual.append((summed, *torch.autograd.grad(summed.square().sum(), (x, probabilities))))
    assert all(torch.equal(whole, cut) for whole, cut in zip(*actual, strict=True))


def test_rows_are_summed_by_token() -> None:
    """A token is the sum of its choices' rows times their probabilities, and 0 if all choices are dropped."""
    _, probabilities, routes = case()
    rows = torch.randn(21, 5, dtype=torch.float64)
    actual, plain = moe_unpermute_eager(rows, routes, probabilities), moe_unpermute_eager(rows, routes)
    for token in range(7):
        own = [
            (rows[row], probabilities[token, choice]) for choice, row in enumerate(routes.dest_row[token]) if row >= 0
        ]
        torch.testing.assert_close(actual[token], sum((row * p for row, p in own), torch.zeros(5).double()))
        torch.testing.assert_close(plain[token], sum((row for row, _ in own), torch.zeros(5).double()))


def test_gradients_match_finite_differences() -> None:
    """Gradients of tokens, rows and probabilities equal finite differences."""
    x, probabilities, routes = case()
    rows = torch.randn(21, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, p: moe_permute_eager(x, p, routes), (x, probabilities))
    assert torch.autograd.gradcheck(lambda rows, p: moe_unpermute_eager(rows, routes, p), (rows, probabilities))
    assert torch.autograd.gradcheck(lambda rows: moe_unpermute_eager(rows, routes), rows)


def test_unpermuting_permuted_tokens_returns_them() -> None:
    """With probabilities that sum to 1, permuting and unpermuting returns every token."""
    x, _, _ = case()
    routes = moe_routes_eager(torch.randint(0, 4, (7, 3)), 4)
    probabilities = torch.rand(7, 3, dtype=torch.float64).softmax(1)
    rows, _ = moe_permute_eager(x, probabilities, routes)
    torch.testing.assert_close(moe_unpermute_eager(rows, routes, probabilities), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    """Many small rows beside a large row are not lost."""
    routes = moe_routes_eager(torch.zeros(1, 65, dtype=torch.int64), 1)
    rows = torch.full((65, 1), 2.0**-9, dtype=dtype)
    rows[0] = 1
    assert moe_unpermute_eager(rows, routes).item() == 1.125


def test_no_tokens_give_empty_results() -> None:
    """Without tokens, results are empty and gradients have the inputs' shapes."""
    x, probabilities, routes = case(tokens=0)
    rows, row_scalars = moe_permute_eager(x, probabilities, routes)
    actual = moe_unpermute_eager(rows, routes, probabilities)
    assert rows.shape == (0, 5) and row_scalars.shape == (0,) and actual.shape == (0, 5)
    grads = torch.autograd.grad(actual.sum(), (x, probabilities))
    assert [grad.shape for grad in grads] == [x.shape, probabilities.shape]
