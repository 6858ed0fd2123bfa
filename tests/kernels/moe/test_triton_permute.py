"""Permutations in Triton against the eager implementation in float64."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.kernels.moe.eager import moe_permute_eager, moe_routes_eager, moe_unpermute_eager
from drawloom.kernels.moe.triton import moe_permute_triton, moe_unpermute_triton
from drawloom.kernels.results import Routes
from support.kernels import DEVICE, assert_all_close, assert_close, draw_tensor, dtypes, exact, few, layouts
from support.seeding import seeds

cases = (st.integers(0, 9), st.integers(1, 5), st.integers(1, 6), st.integers(1, 40))


def routes_of(tokens: int, choices: int, experts: int, with_dropped: bool = True) -> Routes:
    """Return routes without a random number of the unused rows."""
    expert_indices = torch.randint(-1 if with_dropped else 0, experts, (tokens, choices), device=DEVICE)
    routes = moe_routes_eager(expert_indices, experts)
    rows = torch.randint(int(routes.offsets[-1]), tokens * choices + 1, ())
    return routes._replace(source_choice=routes.source_choice[:rows])


@few
@given(seeds, *cases, dtypes, layouts, layouts)
def test_permuting_equals_eager(
    _seed: object, tokens: int, choices: int, experts: int, width: int, dtype: torch.dtype, layout: str, of_grad: str
) -> None:
    """Rows and probabilities are bitwise copies, also unused rows, and gradients agree with float64."""
    x, probabilities = draw_tensor(layout, tokens, width, dtype=dtype), draw_tensor("contiguous", tokens, choices)
    routes = routes_of(tokens, choices, experts)
    actual, expected = moe_permute_triton(x, probabilities, routes), moe_permute_eager(x, probabilities, routes)
    assert all(torch.equal(result, reference) for result, reference in zip(actual, expected, strict=True))
    wide, grad = exact(x, probabilities), draw_tensor(of_grad, len(routes.source_choice), width, dtype=dtype).detach()
    grads = [grad, draw_tensor("contiguous", len(routes.source_choice)).detach()]
    result = torch.autograd.grad(actual, (x, probabilities), grads)
    in_float64 = moe_permute_eager(wide[0], wide[1], routes)
    assert_all_close(result, torch.autograd.grad(in_float64, wide, [grad.double() for grad in grads]), 2)


@few
@given(seeds, *cases, dtypes, layouts, layouts, st.sampled_from(["none", "frozen", "learned"]))
def test_unpermuting_equals_eager(
    _seed: object,
    tokens: int,
    choices: int,
    experts: int,
    width: int,
    dtype: torch.dtype,
    layout: str,
    of_grad: str,
    weights: str,
) -> None:
    """Sums by token, weighted or not, and their gradients agree with float64; gradients of unused rows are 0."""
    routes = routes_of(tokens, choices, experts)
    rows = draw_tensor(layout, len(routes.source_choice), width, dtype=dtype)
    wide = exact(rows)
    probabilities = None if weights == "none" else draw_tensor("contiguous", tokens, choices)
    wide_probabilities = None if probabilities is None else exact(probabilities)[0]
    if weights == "frozen" and probabilities is not None:
        probabilities.requires_grad_(False)
    actual = moe_unpermute_triton(rows, routes, probabilities)
    expected = moe_unpermute_eager(wide[0], routes, wide_probabilities)
    assert actual.dtype == dtype
    assert_close(actual, expected, 2)
    grad = draw_tensor(of_grad, tokens, width, dtype=dtype).detach()
    inputs: Any = (rows, probabilities) if weights == "learned" else (rows,)
    wide_inputs: Any = (wide[0], wide_probabilities) if weights == "learned" else wide
    result = torch.autograd.grad(actual, inputs, grad)
    reference = torch.autograd.grad(expected, wide_inputs, grad.double())
    assert_all_close(result, reference, 4)
    assert not result[0][int(routes.offsets[-1]) :].any()


def test_wide_rows_and_many_choices_are_complete() -> None:
    """Tokens of several tiles, with as many choices as experts, are permuted and summed completely."""
    routes = routes_of(3, 16, 16)
    x, probabilities = draw_tensor("contiguous", 3, 700), draw_tensor("contiguous", 3, 16)
    rows, _ = moe_permute_triton(x, probabilities, routes)
    assert torch.equal(rows, moe_permute_eager(x, probabilities, routes)[0])
    actual = moe_unpermute_triton(rows, routes, probabilities)
    wide = exact(x, probabilities)
    expected = moe_unpermute_eager(moe_permute_eager(wide[0], wide[1], routes)[0], routes, wide[1])
    assert_close(actual, expected, 4)
    grads = torch.autograd.grad(actual.square().sum(), (x, probabilities))
    assert_all_close(grads, torch.autograd.grad(expected.square().sum(), wide), 16)


def test_results_are_deterministic() -> None:
    """Sums and gradients are bitwise the same in a second run."""
    routes, x, p = (
        routes_of(20, 4, 5),
        draw_tensor("contiguous", 20, 33, dtype=torch.bfloat16),
        draw_tensor("contiguous", 20, 4),
    )
    runs = []
    for _ in range(2):
        actual = moe_unpermute_triton(moe_permute_triton(x, p, routes)[0], routes, p)
        runs.append((actual, *torch.autograd.grad(actual.float().square().sum(), (x, p))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_operators_pass_opcheck() -> None:
    """Both directions pass torch.library.opcheck, which torch.compile relies on."""
    routes, x, p = routes_of(5, 2, 3, False), torch.randn(5, 8, device=DEVICE), torch.rand(5, 2, device=DEVICE)
    rows, tables = torch.randn(10, 8, device=DEVICE), (routes.dest_row, routes.offsets)
    torch.library.opcheck(torch.ops.drawloom.moe_spread.default, (x, None, p, *tables, 10, False))
    torch.library.opcheck(torch.ops.drawloom.moe_spread.default, (x, rows, p, *tables, 10, True))
    torch.library.opcheck(torch.ops.drawloom.moe_gather.default, (rows, p, rows[:, 0], routes.dest_row))
