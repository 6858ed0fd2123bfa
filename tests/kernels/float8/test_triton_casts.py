"""Casts and products of float8 in Triton against the eager ones, bit by bit."""

import pytest
import torch
from torch import Tensor

from drawloom.kernels.float8.eager import E4M3, EAGER
from drawloom.kernels.float8.linear import linear_float8, mlp_float8
from drawloom.kernels.float8.triton import TRITON
from support.kernels import DEVICE

SHAPES = [(1, 16), (7, 48), (33, 80), (66, 1040), (5, 3056), (5, 4112)]


def spread(rows: int, width: int, seed: int = 0) -> Tensor:
    """Return bfloat16 numbers whose rows and columns differ in size by many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    x *= torch.exp2(torch.randint(-12, 12, (rows, 1), generator=generator))
    x *= torch.exp2(torch.randint(-6, 6, (width,), generator=generator))
    return x.bfloat16().to(DEVICE)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    bits = {E4M3: torch.uint8, torch.float32: torch.int32}
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.view(bits[actual.dtype]), expected.view(bits[expected.dtype]))


@pytest.mark.parametrize("shape", SHAPES)
def test_casts_of_inputs_and_weights_equal_eager_casts(shape: tuple[int, int]) -> None:
    """Rows, scales and transposed copies equal eager casts bitwise for any number of rows, zeros included."""
    x = spread(*shape)
    x[0] = 0
    for actual, expected in zip(TRITON.quantize_rows(x, True), EAGER.quantize_rows(x, True), strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantized_rows_equal_eager_ones(dtype: torch.dtype) -> None:
    """Rounded rows of every size have the same numbers, which bfloat16 holds exactly; NaN scales stay NaN."""
    for shape in [(0, 16), *SHAPES]:
        rows = EAGER.quantize_rows(spread(*shape), False)
        rows.scale[-1:] = torch.nan
        actual, expected = (kernels.dequantize_rows(*rows[:2], dtype) for kernels in (TRITON, EAGER))
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(
            actual.float(), rows.data.float() * rows.scale[:, None], rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("width", [16, 48, 1040])
def test_casts_of_weights_equal_eager_casts(width: int) -> None:
    """Stacked weights of different heights have the bits of eager casts, by rows and transposed."""
    weights = [spread(rows, width, rows) for rows in (32, 16, 144)]
    data, scale = TRITON.quantize_weights(weights)
    for actual, expected in zip((data, scale), EAGER.quantize_weights(weights), strict=True):
        assert_same_bits(actual, expected)
    assert_same_bits(
        TRITON.quantize_transposed_weights(weights, scale), EAGER.quantize_transposed_weights(weights, scale)
    )


@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (66, 272), (3, 3056)])
def test_casts_of_swiglu_equal_eager_casts(shape: tuple[int, int]) -> None:
    """SwiGLU and its gradient are rounded like eager ones, but for numbers next to the middle of two of e4m3."""
    rows, width = shape
    both, grad = spread(rows, 2 * width).clamp(-16, 16), spread(rows, width, 1)
    factor, row_scale = torch.exp2(spread(2 * width, 1)[:, 0].sign()).float(), torch.full((rows,), 0.5, device=DEVICE)
    results = []
    for kernels in (TRITON, EAGER):
        inner = kernels.quantize_swiglu(both, True)
        assert torch.equal(inner.transposed[:, :rows].t().float(), inner.data.float())
        by_rows = inner.data.float() * inner.scale[:, None]
        gradient = kernels.quantize_swiglu_gradient(grad, both, factor, row_scale)
        of_both = gradient.data.float() * gradient.scale[:, None] / factor
        columns = gradient.columns[:, :rows].t().float() * gradient.column_scale / row_scale[:, None]
        results.append((by_rows, of_both, columns))
        largest = kernels.quantize_swiglu_gradient(grad, both, factor, None)
        assert torch.equal(largest.data.float(), gradient.data.float()) and not largest.columns.numel()
    for actual, expected in zip(*results, strict=True):
        limit = expected.abs().amax(1, keepdim=True) / 8  # at least the distance of two numbers of e4m3
        assert ((actual - expected).abs() <= limit).all()
        assert (actual == expected).float().mean() > 0.99


@pytest.mark.parametrize("shape", SHAPES)
def test_casts_of_gradients_equal_eager_casts(shape: tuple[int, int]) -> None:
    """Gradients by rows and by columns equal eager casts bitwise, with rows and columns of zeros."""
    grad, factor = spread(*shape), EAGER.quantize_rows(spread(shape[1], 16, seed=1), False).scale
    row_scale = EAGER.quantize_rows(spread(shape[0], 16, seed=2), False).scale
    grad[-1], grad[:, 3] = 0, 0
    for scales in (row_scale, None):
        actual, expected = (kernels.quantize_gradient([grad], factor, scales) for kernels in (TRITON, EAGER))
        for left, right in zip(actual, expected, strict=True):
            assert_same_bits(left, right)


@pytest.mark.parametrize("widths", [(16, 48), (32, 16, 16), (1024, 16, 272), (2016, 64, 976)])
def test_casts_of_gradients_side_by_side_equal_casts_of_one_tensor(widths: tuple[int, ...]) -> None:
    """Two or three gradients, one of them strided, are cast like their concatenation."""
    grads = [spread(9, 2 * width, width)[:, width:] for width in widths]
    factor, row_scale = torch.ones(sum(widths), device=DEVICE), torch.ones(9, device=DEVICE)
    expected = EAGER.quantize_gradient([torch.cat(grads, 1)], factor, row_scale)
    for left, right in zip(TRITON.quantize_gradient(grads, factor, row_scale), expected, strict=True):
        assert_same_bits(left, right)


def test_casts_read_strided_rows() -> None:
    """A slice of wider rows is cast like its copy."""
    wide = spread(9, 96)
    x, factor = wide[:, 16:64], torch.ones(48, device=DEVICE)
    assert torch.equal(
        TRITON.quantize_rows(x, False).data.float(), TRITON.quantize_rows(x.contiguous(), False).data.float()
    )
    gradients = [TRITON.quantize_gradient([grad], factor, None).data.float() for grad in (x, x.contiguous())]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_is_not_finite_reaches_results(value: float) -> None:
    """An infinite or undefined element makes NaN of the scales for its row and for all columns, and no others."""
    x = spread(20, 32)
    x[4, 5] = value
    scale = TRITON.quantize_rows(x, False).scale
    assert scale.isnan().nonzero().tolist() == [[4]]
    gradient = TRITON.quantize_gradient([x], torch.ones(32, device=DEVICE), torch.ones(20, device=DEVICE))
    assert gradient.scale.isnan().nonzero().tolist() == [[4]]
    assert gradient.column_scale.isnan().all()


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(32, 64, 48), (23, 16, 32), (300, 128, 256)])
def test_layers_equal_eager_layers(tokens: int, inputs: int, outputs: int) -> None:
    """Results, gradients and their sums agree with eager ones up to the order of additions."""
    x, weight, grad = spread(tokens, inputs), spread(outputs, inputs, 1), spread(tokens, outputs, 2)
    bias = torch.randn(outputs, device=DEVICE).bfloat16()
    results = []
    for kernels in (TRITON, EAGER):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, weight, bias)]
        y = linear_float8(kernels, *leaves)
        results.append((y, *torch.autograd.grad(y, leaves, grad)))
    for actual, expected in zip(*results, strict=True):
        size = expected.float().abs().amax()
        torch.testing.assert_close(actual / size, expected / size, atol=8e-3, rtol=8e-3)


def test_feed_forward_networks_equal_eager_ones() -> None:
    """Results and gradients agree with eager ones up to the order of additions."""
    shapes = (23, 32), (64, 32), (64, 32), (48, 64)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).bfloat16().to(DEVICE) for shape in (*shapes, (23, 48))]
    results = []
    for kernels in (TRITON, EAGER):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors[:4]]
        y = mlp_float8(kernels, *leaves)
        results.append((y, *torch.autograd.grad(y, leaves, tensors[4])))
    for actual, expected in zip(*results, strict=True):
        size = expected.float().abs().amax()
        torch.testing.assert_close(actual / size, expected / size, atol=2e-2, rtol=2e-2)
