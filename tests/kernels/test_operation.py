"""Eager kernels under torch.compile; tests/kernels/triton/test_primitives.py has the Triton kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.cross_entropy.cut import cut_cross_entropy_eager
from drawloom.kernels.cross_entropy.eager import linear_cross_entropy_eager
from drawloom.kernels.gates.eager import geglu_eager, oss_swiglu_halves_eager, swiglu_eager, swiglu_halves_eager
from drawloom.kernels.linear import embedding_eager, linear_eager
from drawloom.kernels.moe.eager import moe_permute_eager, moe_routes_eager, moe_unpermute_eager
from drawloom.kernels.operation import once_differentiable
from drawloom.kernels.rms_norm.eager import add_rms_norm_eager, rms_norm_eager
from drawloom.kernels.rope.eager import qk_norm_rope_eager, rope_eager

TARGETS = torch.tensor([0, 3, -100, 5])
ROUTES = moe_routes_eager(torch.tensor([[0, 2], [1, -1], [2, 1], [0, 1]]), 3)
ANGLES = torch.linspace(-1, 1, 32).view(1, 4, 8), torch.linspace(1, 0, 32).view(1, 4, 8)

CALLS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "linear": (linear_eager, [(4, 16), (8, 16)]),
    "embedding": (lambda weight: embedding_eager(TARGETS.clamp(0), weight), [(8, 16)]),
    "rms_norm": (lambda x, weight: rms_norm_eager(x, weight, 1e-6), [(4, 16), (16,)]),
    "add_rms_norm": (lambda x, y, weight: add_rms_norm_eager(x, y, weight, 1e-6), [(4, 16), (4, 16), (16,)]),
    "swiglu": (swiglu_eager, [(4, 16), (4, 16)]),
    "swiglu, scaled": (swiglu_eager, [(4, 16), (4, 16), (4,)]),
    "swiglu_halves": (swiglu_halves_eager, [(4, 16)]),
    "geglu": (geglu_eager, [(4, 16), (4, 16)]),
    "oss_swiglu_halves": (lambda x, scale: oss_swiglu_halves_eager(x, scale, 1.7, 2.0), [(4, 16), (4,)]),
    "rope": (lambda x: rope_eager(x, *ANGLES), [(1, 4, 3, 16)]),
    "qk_norm_rope": (
        lambda q, k, of_q, of_k: qk_norm_rope_eager(q, k, of_q, of_k, 1e-6, *ANGLES),
        [(1, 4, 3, 16), (1, 4, 2, 16), (16,), (16,)],
    ),
    "linear_cross_entropy": (lambda x, weight: linear_cross_entropy_eager(x, weight, TARGETS), [(4, 16), (8, 16)]),
    "cut_cross_entropy": (lambda x, weight: cut_cross_entropy_eager(x, weight, TARGETS), [(4, 16), (8, 16)]),
    "moe_permute": (lambda x, chances: moe_permute_eager(x, chances, ROUTES), [(4, 16), (4, 2)]),
    "moe_unpermute": (lambda x, chances: moe_unpermute_eager(x, ROUTES, chances), [(8, 16), (4, 2)]),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does
def test_operations_compile_without_breaks(name: str) -> None:
    """An operation that is traced as one graph, with others around it, has the gradients of eager mode."""
    call, shapes = CALLS[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def compute(*given: Tensor) -> Tensor:
        actual = call(*(2 * x for x in given))
        return torch.stack([x.tanh().sum() for x in (actual if isinstance(actual, tuple) else (actual,))]).sum()

    torch.compiler.reset()  # each call is another function to it, and it takes few of them
    compiled: Any = torch.compile(compute, fullgraph=True, backend="aot_eager")
    expected, actual = (torch.autograd.grad(function(*inputs), inputs) for function in (compute, compiled))
    torch.testing.assert_close(actual, expected)
    assert any(gradient.any() for gradient in actual)


class _Square(Function):
    """Square whose gradient is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return 2 * x * grad


def test_a_second_derivative_is_refused() -> None:
    """With `create_graph`, the gradient of a gradient is an error, and not a wrong number."""
    x = torch.tensor(3.0, requires_grad=True)
    square: Any = _Square.apply
    (once,) = torch.autograd.grad(square(x), x)
    assert once == 6 and not once.requires_grad
    (kept,) = torch.autograd.grad(square(x), x, torch.tensor(1.0, requires_grad=True), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.backward([kept])
