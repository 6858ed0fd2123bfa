"""Weights of foreign matrix products, and what is no such product."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drawloom.components.pipeline.split_backward.autograd_partition import paths_of
from drawloom.components.pipeline.split_backward.matmul_grads import Product, product_of
from drawloom.kernels.deferred_grads import Deferral

Use = Callable[[Tensor, nn.Parameter], Tensor]


def found(use: Use, x: Tensor, weight: nn.Parameter) -> tuple[Tensor, list[Product | None]]:
    """The output, and the products by which the weight joins the activations."""
    y = use(x, weight)
    return y, [product_of(join) for group in paths_of([y], [x], Deferral()).groups for join in group.joins]


PRODUCTS: dict[str, Use] = {
    "x @ w": lambda x, w: x @ w,
    "x @ w.T": lambda x, w: x @ w.t(),
    "w @ x": lambda x, w: w @ x,
    "w.T @ x": lambda x, w: w.t() @ x,
    "linear": lambda x, w: nn.functional.linear(x, w),
    "linear with bias": lambda x, w: nn.functional.linear(x, w, x[0]),
    "addmm": lambda x, w: torch.addmm(x, x, w),
    "twice": lambda x, w: (x @ w.t()).tanh() @ w,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_gradient_of_a_product(name: str) -> None:
    """On either side, transposed or not, the weight's gradient follows from what comes in and the other factor."""
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    y, joins = found(PRODUCTS[name], x, weight)
    products = [product for product in joins if product is not None]
    assert len(products) == len(joins)
    assert all(product.weight is weight and product.factor.grad_fn is None for product in products)
    grad = torch.randn_like(y)
    asked: list[Any] = [weight, *(product.edge for product in products)]
    expected, *came = torch.autograd.grad(y, asked, grad)
    parts = [product.gradient(incoming, product.factor) for product, incoming in zip(products, came, strict=True)]
    torch.testing.assert_close(sum(parts), expected)


OTHERS: dict[str, Use] = {
    "scaled addmm": lambda x, w: torch.addmm(x, x, w, alpha=2),
    "elementwise": lambda x, w: x * w,
    "weight that is computed": lambda x, w: x @ (w * 2),
    "batch": lambda x, w: torch.bmm(x.expand(2, 4, 4), w.expand(2, 4, 4)),
    "recomputed": lambda x, w: checkpoint(lambda x: (x @ w).tanh(), x, use_reentrant=False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_product_with_a_weight(name: str) -> None:
    """Anything else is left to others, as is what has to be recomputed."""
    x, weight = torch.randn(4, 4, requires_grad=True), nn.Parameter(torch.randn(4, 4))
    _, products = found(OTHERS[name], x, weight)
    assert products == [None]


def test_complex_numbers() -> None:
    """Products of complex numbers, whose gradients are conjugate, are left to autograd."""
    x = torch.randn(4, 4, dtype=torch.complex64, requires_grad=True)
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    assert found(PRODUCTS["x @ w"], x, weight)[1] == [None]
