"""Permutations in Triton against the eager ones in float64."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.kernels.moe import Routes, moe_permute_eager, moe_routes_eager, moe_unpermute_eager
from drawloom.kernels.triton.moe_permute import moe_permute_triton, moe_unpermute_triton
from support.kernels import DEVICE, assert_all_close, assert_close, drawn, dtypes, exact, few, layouts
from support.seeding import seeds

cases = (st.integers(0, 9), st.integers(1, 5), st.integers(1, 6), st.integers(1, 40))


def routes_of(tokens: int, choices: int, experts: int, with_dropped: bool = True) -> Routes:
    """Routes; at random as many places of unused rows are cut off."""
    expert_indices = torch.randint(-1 if with_dropped else 0, experts, (tokens, choices), device=DEVICE)
    routes = moe_routes_eager(expert_indices, experts)
    rows = torch.randint(int(routes.offsets[-1]), tokens * choices + 1, ())
    return routes._replace(source_choice=routes.source_choice[:rows])


@few
@given(seeds, *cases, dtypes, layouts, layouts)
def test_permutes_as_eager(
    _seed: object, tokens: int, choices: int, experts: int, width: int, dtype: torch.dtype, layout: str, of_grad: str
) -> None:
    """Rows and their probabilities are copies, bit for bit, unused rows too; gradients are sums."""
    x, probabilities = drawn(layout, tokens, width, dtype=dtype), drawn("contiguous", tokens, choices)
    routes = routes_of(tokens, choices, experts)
    found, expected = moe_permute_triton(x, probabilities, routes), moe_permute_eager(x, probabilities, routes)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    wide, grad = exact(x, probabilities), drawn(of_grad, len(routes.source_choice), width, dtype=dtype).detach()
    grads = [grad, drawn("contiguous", len(routes.source_choice)).detach()]
    ours = torch.autograd.grad(found, (x, probabilities), grads)
    in_float64 = moe_permute_eager(wide[0], wide[1], routes)
    assert_all_close(ours, torch.autograd.grad(in_float64, wide, [grad.double() for grad in grads]), 2)


@few
@given(seeds, *cases, dtypes, layouts, layouts, st.sampled_from(["none", "frozen", "learned"]))
def test_adds_up_as_eager(
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
    """Sums by token, weighted or not, and their gradients are those of float64; unused rows get zero."""
    routes = routes_of(tokens, choices, experts)
    rows = drawn(layout, len(routes.source_choice), width, dtype=dtype)
    wide = exact(rows)
    probabilities = None if weights == "none" else drawn("contiguous", tokens, choices)
    wide_probabilities = None if probabilities is None else exact(probabilities)[0]
    if weights == "frozen" and probabilities is not None:
        probabilities.requires_grad_(False)
    found = moe_unpermute_triton(rows, routes, probabilities)
    expected = moe_unpermute_eager(wide[0], routes, wide_probabilities)
    assert found.dtype == dtype
    assert_close(found, expected, 2)
    grad = drawn(of_grad, tokens, width, dtype=dtype).detach()
    inputs: Any = (rows, probabilities) if weights == "learned" else (rows,)
    wide_inputs: Any = (wide[0], wide_probabilities) if weights == "learned" else wide
    ours = torch.autograd.grad(found, inputs, grad)
    theirs = torch.autograd.grad(expected, wide_inputs, grad.double())
    assert_all_close(ours, theirs, 4)
    assert not ours[0][int(routes.offsets[-1]) :].any()


def test_wide_rows_and_many_choices() -> None:
    """Tokens of several tiles, with as many choices as experts, are permuted and summed completely."""
    routes = routes_of(3, 16, 16)
    x, probabilities = drawn("contiguous", 3, 700), drawn("contiguous", 3, 16)
    rows, _ = moe_permute_triton(x, probabilities, routes)
    assert torch.equal(rows, moe_permute_eager(x, probabilities, routes)[0])
    found = moe_unpermute_triton(rows, routes, probabilities)
    wide = exact(x, probabilities)
    expected = moe_unpermute_eager(moe_permute_eager(wide[0], wide[1], routes)[0], routes, wide[1])
    assert_close(found, expected, 4)
    grads = torch.autograd.grad(found.square().sum(), (x, probabilities))
    assert_all_close(grads, torch.autograd.grad(expected.square().sum(), wide), 16)


def test_results_are_deterministic() -> None:
    """Sums and gradients are bitwise the same in a second run."""
    routes, x, p = routes_of(20, 4, 5), drawn("contiguous", 20, 33, dtype=torch.bfloat16), drawn("contiguous", 20, 4)
    runs = []
    for _ in range(2):
        found = moe_unpermute_triton(moe_permute_triton(x, p, routes)[0], routes, p)
        runs.append((found, *torch.autograd.grad(found.float().square().sum(), (x, p))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_passes_opcheck() -> None:
    """Both directions pass torch.library.opcheck, which torch.compile relies on."""
    routes, x, p = routes_of(5, 2, 3, False), torch.randn(5, 8, device=DEVICE), torch.rand(5, 2, device=DEVICE)
    rows, where = torch.randn(10, 8, device=DEVICE), (routes.dest_row, routes.offsets)
    torch.library.opcheck(torch.ops.drawloom.moe_spread.default, (x, None, p, *where, 10, False))
    torch.library.opcheck(torch.ops.drawloom.moe_spread.default, (x, rows, p, *where, 10, True))
    torch.library.opcheck(torch.ops.drawloom.moe_gather.default, (rows, p, rows[:, 0], routes.dest_row))
