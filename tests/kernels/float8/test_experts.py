"""Experts in float8 against float64 products and bfloat16 experts, and their shapes on the meta device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drawloom.kernels.deferral import Deferral
from drawloom.kernels.deferred_grads import Accumulation
from drawloom.kernels.float8.eager import EAGER
from drawloom.kernels.float8.experts import CachedFloat8Experts, expert_rows_float8, experts_float8
from drawloom.kernels.gates.eager import swiglu_halves_eager
from drawloom.kernels.grouped_gemm.eager import grouped_gemm_eager
from drawloom.kernels.moe.eager import moe_permute_eager, moe_routes_eager, moe_unpermute_eager
from drawloom.kernels.recompute.repeated_calls import call_with_recomputation
from drawloom.kernels.recompute.selective import Selective
from drawloom.kernels.results import Routes

TOKENS, WIDTH, INNER, EXPERTS, TOP_K = 45, 32, 48, 6, 3


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).bfloat16().requires_grad_()


def draw_leaves() -> list[Tensor]:
    """Return tokens, probabilities, and both weights."""
    probabilities = torch.rand(TOKENS, TOP_K).requires_grad_()
    weights = draw(EXPERTS, 2 * INNER, WIDTH, scale=0.3), draw(EXPERTS, WIDTH, INNER, scale=0.3)
    return [draw(TOKENS, WIDTH), probabilities, *weights]


def draw_routes() -> Routes:
    """Return routes with dropped choices, and without any token for the last expert."""
    return moe_routes_eager(torch.randint(-1, EXPERTS - 1, (TOKENS, TOP_K)), EXPERTS)


def in_float8(routes: Routes) -> Callable[..., Tensor]:
    return lambda x, probabilities, gate_up, down: experts_float8(EAGER, x, probabilities, gate_up, down, routes)


def reference(routes: Routes) -> Callable[..., Tensor]:
    """Return the same function by separate operations in the leaves' dtype."""

    def compute(x: Tensor, probabilities: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        rows, scale = moe_permute_eager(x, probabilities, routes)
        gate_and_up = grouped_gemm_eager(rows, gate_up, routes.offsets, True)
        outputs = grouped_gemm_eager(swiglu_halves_eager(gate_and_up, scale), down, routes.offsets, True)
        return moe_unpermute_eager(outputs, routes)

    return compute


def gradients(function: Callable[..., Tensor], *leaves: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    y = function(*leaves)
    return (y, *torch.autograd.grad(y, leaves, grad))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double() - expected.detach()).norm() / expected.detach().norm())


def test_results_and_gradients_are_as_precise_as_roundings() -> None:
    """Results and gradients differ from float64's by some operands' rounding errors."""
    leaves, routes, grad = draw_leaves(), draw_routes(), draw(TOKENS, WIDTH).detach()
    with torch.no_grad():
        leaves[0] *= torch.exp2(torch.randint(-1, 1, (TOKENS, 1)))
        leaves[2] *= torch.exp2(torch.randint(-2, 2, (EXPERTS, 1, 1)))
        grad *= torch.exp2(torch.randint(-8, 8, (TOKENS, 1)))
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    actual = gradients(in_float8(routes), *leaves, grad=grad)
    expected = gradients(reference(routes), *wide, grad=grad.double())
    for left, right in zip(actual, expected, strict=True):
        assert relative_error(left, right) < 0.09
    assert not actual[3][-1].any() and not actual[4][-1].any()  # an expert without tokens


def test_exact_products_equal_those_of_bfloat16() -> None:
    """Small integers lose nothing: results and the down projection's gradient equal bfloat16's bit for bit."""
    routes = moe_routes_eager(torch.randint(0, EXPERTS, (TOKENS, TOP_K)), EXPERTS)
    x = torch.randint(-4, 5, (TOKENS, WIDTH)).bfloat16()
    gate_up = torch.zeros(EXPERTS, 2 * INNER, WIDTH).bfloat16()
    gate_up[:, :INNER, 0] = 64  # silu(4096) is 4096, and silu(-4096) is 0
    gate_up[:, INNER + torch.arange(INNER), 1 + torch.arange(INNER) % (WIDTH - 1)] = 4
    x[:, 0], x[:, 1:] = 64 * x[:, 0].sign(), x[:, 1:] % 4
    down = torch.randint(-4, 5, (EXPERTS, WIDTH, INNER)).bfloat16()
    probabilities = torch.exp2(torch.randint(-3, 1, (TOKENS, TOP_K))).float()
    leaves = [tensor.requires_grad_() for tensor in (x, probabilities, gate_up, down)]
    grad = torch.randint(-1, 2, (TOKENS, WIDTH)).bfloat16()
    actual = gradients(in_float8(routes), *leaves, grad=grad)
    expected = gradients(reference(routes), *leaves, grad=grad)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[4], expected[4])


def test_rows_and_tokens_have_equal_bits() -> None:
    """Experts on a dispatcher's rows equal experts on tokens, bit for bit."""
    leaves, grad = draw_leaves(), draw(TOKENS, WIDTH).detach()
    routes = moe_routes_eager(torch.randint(0, EXPERTS, (TOKENS, TOP_K)), EXPERTS)

    def by_rows(x: Tensor, probabilities: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        rows, scale = moe_permute_eager(x, probabilities, routes)
        return moe_unpermute_eager(expert_rows_float8(EAGER, rows, scale, gate_up, down, routes.offsets), routes)

    actual, expected = (gradients(function, *leaves, grad=grad) for function in (by_rows, in_float8(routes)))
    for left, right in zip(actual, expected, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_number_that_is_not_finite_reaches_its_experts_gradients(value: float) -> None:
    """A token whose gradient is not finite makes its experts' gradients NaN, so that the step is skipped."""
    leaves, grad = draw_leaves(), draw(TOKENS, WIDTH).detach()
    choices = torch.zeros(TOKENS, TOP_K, dtype=torch.long)
    choices[4] = 2
    grad[4, 3] = value
    _, grad_x, _, *of_weights = gradients(in_float8(moe_routes_eager(choices, EXPERTS)), *leaves, grad=grad)
    assert grad_x[4].isnan().all() and not grad_x[:4].isnan().any()
    for gradient in of_weights:
        assert gradient[2].isnan().all() and not gradient[0].isnan().any()


def test_deferred_recomputed_and_kept_gradients_have_the_same_bits() -> None:
    """Split backward passes, accumulation, recomputation and kept weights change no bit."""
    leaves, routes, grad = draw_leaves(), draw_routes(), draw(TOKENS, WIDTH).detach()
    function = in_float8(routes)
    expected = gradients(function, *leaves, grad=grad)
    deferral = Deferral()
    with deferral:
        y = function(*leaves)
    with deferral.defer():
        of_inputs = torch.autograd.grad(y, leaves, grad, allow_unused=True)
    assert of_inputs[2] is None and of_inputs[3] is None
    deferred = {
        id(gradient.weight): gradient.drain_and_return_remaining_grad() for gradient in deferral.take_queued_gradients()
    }
    for number in (2, 3):
        assert torch.equal(deferred[id(leaves[number])], expected[number + 1])
    for weight in leaves[2:]:
        weight.grad_dtype = torch.float32
    for _ in range(2):
        with Accumulation():
            y = function(*leaves)
        torch.autograd.backward(y, grad, inputs=leaves[2:])
    for number in (2, 3):
        assert torch.equal(leaves[number].grad, 2 * expected[number + 1].float())
        leaves[number].grad = leaves[number].grad_dtype = None
    with Selective():
        y = function(*leaves)
    for left, right in zip(torch.autograd.grad(y, leaves, grad), expected[1:], strict=True):
        assert torch.equal(left, right)
    for left, right in zip(
        torch.autograd.grad(call_with_recomputation(function, *leaves), leaves, grad), expected[1:], strict=True
    ):
        assert torch.equal(left, right)
    kept = [CachedFloat8Experts([weight]) for weight in leaves[2:]]
    addresses = [operation.rows.data.data_ptr() for operation in kept]
    for left, right in zip(gradients(function, *leaves, grad=grad), expected, strict=True):
        assert torch.equal(left, right)
    with torch.no_grad():
        for weight in leaves[2:]:
            weight.mul_(0.7)
    fresh = [*leaves[:2], *(weight.detach().clone().requires_grad_() for weight in leaves[2:])]
    changed = gradients(function, *leaves, grad=grad), gradients(function, *fresh, grad=grad)
    assert all(torch.equal(left, right) for left, right in zip(*changed, strict=True))
    assert addresses == [operation.rows.data.data_ptr() for operation in kept]


@pytest.mark.parametrize("kernels", ["eager", "triton"])
def test_shapes_on_the_meta_device(kernels: str) -> None:
    """Plans run experts without values: neither implementation reads the rows' ends on the host."""
    chosen = EAGER
    if kernels == "triton":
        pytest.importorskip("triton")
        from drawloom.kernels.float8.triton import TRITON

        chosen = TRITON
    with torch.device("meta"):
        leaves = [torch.empty_like(leaf).requires_grad_() for leaf in draw_leaves()]
        routes = Routes(
            *(torch.empty(shape, dtype=torch.int32) for shape in ((TOKENS, TOP_K), (TOKENS * TOP_K,), (EXPERTS,)))
        )
        y = experts_float8(chosen, leaves[0], leaves[1], leaves[2], leaves[3], routes)
        grads = torch.autograd.grad(y, leaves, torch.empty_like(y))
    assert y.shape == leaves[0].shape
    assert [(grad.shape, grad.dtype) for grad in grads] == [(leaf.shape, leaf.dtype) for leaf in leaves]
