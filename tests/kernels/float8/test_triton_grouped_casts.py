"""Experts' casts and products in Triton against the eager ones, bit by bit where nothing is summed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.kernels.float8.eager import EAGER, ScaledRows, allocate_quantized_experts
from drawloom.kernels.float8.experts import expert_rows_float8, experts_float8
from drawloom.kernels.float8.triton import TRITON
from drawloom.kernels.moe.eager import moe_routes_eager
from support.kernels import DEVICE

EXPERTS, TOP_K = 5, 2
COUNTS = [140, 0, 3, 129, 16]
UNUSED = 4


def spread(*shape: int, seed: int = 0) -> Tensor:
    """Return bfloat16 numbers whose rows differ in size by many binades."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-6, 6, (*shape[:-1], 1), generator=generator))
    return x.bfloat16().to(DEVICE)


def rows_by_expert(width: int, seed: int = 0) -> ScaledRows:
    """Return rounded rows for COUNTS, and UNUSED rows, whose scale is not a number."""
    data, scale, _ = EAGER.quantize_rows(spread(sum(COUNTS) + UNUSED, width, seed=seed), False)
    scale[sum(COUNTS) :] = torch.nan
    return ScaledRows(data, scale)


def row_ends() -> Tensor:
    return torch.tensor(COUNTS).cumsum(0).to(DEVICE, torch.int32)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual.float(), expected.float(), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("width", [16, 80, 1040])
def test_tokens_are_copied_to_the_rows_of_their_choices(width: int) -> None:
    """Rows, scales and probabilities equal the eager ones, with zeros for dropped choices."""
    choices = torch.randint(-1, EXPERTS, (37, TOP_K), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    routes = moe_routes_eager(choices, EXPERTS)
    data, scale, _ = EAGER.quantize_rows(spread(37, width), False)
    probabilities = torch.rand(37, TOP_K, device=DEVICE)
    for given in (probabilities, None):
        for actual, expected in zip(
            TRITON.copy_tokens_to_expert_rows(ScaledRows(data, scale), given, routes),
            EAGER.copy_tokens_to_expert_rows(ScaledRows(data, scale), given, routes),
            strict=True,
        ):
            assert_same(actual, expected)


@pytest.mark.parametrize("shape", [(3, 16, 48), (2, 144, 272)])
def test_casts_of_weights_equal_eager_casts(shape: tuple[int, int, int]) -> None:
    """Elements, scales by expert and transposed copies equal eager ones; an expert with zeros has a finite scale."""
    weight = spread(*shape)
    weight[1] = 0
    weight[0, 3, 5] = -7.0
    data, scale = EAGER.quantize_experts(weight)
    for actual, expected in zip(TRITON.quantize_experts(weight), (data, scale), strict=True):
        assert_same(actual, expected)
    assert_same(TRITON.quantize_transposed_experts(weight, scale), data.transpose(1, 2))
    rows = allocate_quantized_experts(weight)
    TRITON.quantize_experts_into(weight, rows)
    for actual, expected in zip(rows, (data, scale, data.transpose(1, 2)), strict=True):
        assert_same(actual, expected)
    weight[0, 0, 0] = torch.nan
    assert TRITON.quantize_experts(weight)[1].isnan().tolist() == [True] + [False] * (shape[0] - 1)


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (7, 48), (66, 272)])
def test_casts_of_swiglu_equal_eager_casts(rows: int, width: int) -> None:
    """SwiGLU and its gradients agree, but for numbers halfway between two e4m3 numbers."""
    gate_and_up, grad = spread(rows, 2 * width).clamp(-16, 16), spread(rows, width, seed=1)
    probabilities = torch.rand(rows, device=DEVICE)
    results: list[Any] = []
    for kernels in (TRITON, EAGER):
        data, scale = kernels.quantize_expert_swiglu(gate_and_up, probabilities)
        gradient, gradient_scale, grad_probabilities = kernels.quantize_expert_swiglu_gradient(
            grad, gate_and_up, probabilities
        )
        results.append((data.float() * scale[:, None], gradient.float() * gradient_scale[:, None], grad_probabilities))
    for actual, expected in zip(results[0][:2], results[1][:2], strict=True):
        limit = expected.abs().amax(1, keepdim=True) / 8  # at least the distance of two numbers of e4m3
        assert ((actual - expected).abs() <= limit).all()
        assert (actual == expected).float().mean() > 0.99
    torch.testing.assert_close(results[0][2], results[1][2], rtol=1e-3, atol=1e-3 * float(results[1][2].abs().max()))


@pytest.mark.parametrize("indexed", [False, True])
def test_factors_of_gradients_equal_eager_ones(indexed: bool) -> None:
    """Transposed copies have every expert's rows in its own columns, with zeros up to the next group."""
    left, ends = rows_by_expert(48), row_ends()
    rows = rows_by_expert(80, seed=1)
    right, choices = rows, None
    if indexed:
        choices = torch.randint(0, 2 * 50, (len(left.data),), generator=torch.Generator().manual_seed(0))
        choices = choices.to(DEVICE, torch.int32)
        right = ScaledRows(EAGER.quantize_rows(spread(50, 80), False).data, rows.scale)
    actual, expected = (
        kernels.prepare_outer_product_factors(left, right, choices, TOP_K, ends) for kernels in (TRITON, EAGER)
    )
    columns = sum(-(-count // 128) * 128 for count in COUNTS)
    for name in ("left", "right"):
        assert_same(getattr(actual, name)[:, :columns], getattr(expected, name)[:, :columns])
    assert_same(actual.scale, expected.scale)


def test_products_equal_eager_ones() -> None:
    """Products by row and by expert agree up to summation order, also for experts without rows."""
    left, ends, used = rows_by_expert(272), row_ends(), sum(COUNTS)
    data, scale = EAGER.quantize_experts(spread(EXPERTS, 304, 272))
    for fast in (True, False):
        actual, expected = (
            kernels.multiply_rows_by_expert(*left, data, scale, ends, fast)[:used].float()
            for kernels in (TRITON, EAGER)
        )
        torch.testing.assert_close(actual, expected, rtol=8e-3, atol=8e-3 * float(expected.abs().max()))
    factors = EAGER.prepare_outer_product_factors(left, rows_by_expert(144, seed=2), None, 1, ends)
    actual, expected = (kernels.sum_outer_products(*factors, ends).float() for kernels in (TRITON, EAGER))
    torch.testing.assert_close(actual, expected, rtol=8e-3, atol=8e-3 * float(expected.abs().max()))
    assert not actual[1].any()


def test_experts_equal_eager_ones() -> None:
    """The whole operation's results and gradients agree with eager ones up to summation order."""
    generator = torch.Generator().manual_seed(0)
    choices = torch.randint(0, EXPERTS, (40, TOP_K), generator=generator).to(DEVICE)
    shapes = (40, 32), (EXPERTS, 96, 32), (EXPERTS, 32, 48), (40, 32)
    x, gate_up, down, grad = (torch.randn(shape, generator=generator).bfloat16().to(DEVICE) for shape in shapes)
    probabilities = torch.rand(40, TOP_K, generator=generator).to(DEVICE)
    results = []
    for kernels in (TRITON, EAGER):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, probabilities, gate_up, down)]
        routes = moe_routes_eager(choices, EXPERTS)
        y = experts_float8(kernels, leaves[0], leaves[1], leaves[2], leaves[3], routes)
        results.append((y, *torch.autograd.grad(y, leaves, grad)))
    for actual, expected in zip(*results, strict=True):
        size = expected.float().abs().amax()
        torch.testing.assert_close(actual / size, expected / size, atol=2e-2, rtol=2e-2)


def test_a_number_that_is_not_finite_reaches_the_gradients_of_its_expert() -> None:
    """A row whose scale is not finite makes its expert's weight gradient NaN, and no other."""
    left, right, ends = rows_by_expert(16), rows_by_expert(16, seed=1), row_ends()
    left.scale[141] = torch.nan
    for kernels in (TRITON, EAGER):
        scale = kernels.prepare_outer_product_factors(left, right, None, 1, ends).scale
        assert scale.isnan().tolist() == [False, False, True, False, False]


def test_a_rank_without_rows_has_zero_gradients() -> None:
    """Experts without any row return no rows, and zero weight gradients."""
    rows, probabilities = torch.zeros(0, 32, device=DEVICE).bfloat16(), torch.zeros(0, device=DEVICE)
    weights = [spread(*shape).requires_grad_() for shape in ((3, 96, 32), (3, 32, 48))]
    ends = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    for kernels in (TRITON, EAGER):
        y = expert_rows_float8(kernels, rows, probabilities, weights[0], weights[1], ends)
        assert y.shape == (0, 32)
        assert not any(gradient.any() for gradient in torch.autograd.grad(y.sum(), weights))
