"""The log-sum-exp whose order of additions depends on the width alone."""

import pytest
import torch

from drawloom.kernels.cross_entropy.logsumexp import logsumexp_in_fixed_order


@pytest.mark.parametrize("width", [1, 2, 3, 7, 96, 257, 1000])
def test_logsumexp_by_halves_is_logsumexp(width: int) -> None:
    """Values and gradients are torch's, for odd and even widths, and for great numbers."""
    x = (torch.randn(2, 3, width, dtype=torch.float64) * 300).requires_grad_()
    pairs = [
        (value, torch.autograd.grad(value.sin().sum(), x)[0])
        for value in (logsumexp_in_fixed_order(x), x.logsumexp(-1))
    ]
    torch.testing.assert_close(*pairs, rtol=1e-12, atol=1e-12)


def test_a_sum_is_a_tree_over_the_width() -> None:
    """Halves are added to each other; an odd last column joins the next halving."""
    x = torch.randn(1000, 5)
    largest = x.amax(1)
    terms = (x - largest[:, None]).exp()
    tree = ((terms[:, 0] + terms[:, 2]) + (terms[:, 1] + terms[:, 3])) + terms[:, 4]
    assert logsumexp_in_fixed_order(x).equal(tree.log() + largest)


def test_a_row_that_is_not_finite_has_no_finite_result() -> None:
    """NaN, and a row of infinities, stay visible in the result."""
    rows = torch.tensor([[0.0, torch.nan], [torch.inf, torch.inf], [-torch.inf, -torch.inf]])
    assert not logsumexp_in_fixed_order(rows).isfinite().any()
