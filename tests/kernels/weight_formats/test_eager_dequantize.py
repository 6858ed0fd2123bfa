"""Products with quantized weights against products with the dequantized weights, bit for bit."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.kernels.float8.eager import EAGER
from drawloom.kernels.float8.linear import linear_float8, linear_quantized_float8
from drawloom.kernels.grouped_gemm.eager import grouped_gemm_eager
from drawloom.kernels.weight_formats.eager import (
    FORMATS,
    dequantize_eager,
    linear_quantized,
    multiply_quantized_experts,
)

NAMES = sorted(FORMATS)


def results(function: Any, x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return a function's result, x's gradient, and the tensors saved for the backward pass."""
    leaf, saved = x.clone().requires_grad_(), list[Tensor]()

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        y = function(leaf)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16())
    assert leaf.grad is not None
    return y.detach(), leaf.grad, saved


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bias", [None, torch.randn(48).bfloat16()], ids=["plain", "bias"])
def test_linear_layers_equal_dense_ones_and_save_only_storage(name: str, bias: Tensor | None) -> None:
    """Result and gradient equal a dense product bit for bit; neither x nor a dense weight is saved."""
    x, stored = torch.randn(2, 5, 256).bfloat16(), FORMATS[name].quantize(torch.randn(48, 256))
    weight = dequantize_eager(stored, name)
    ours = results(lambda x: linear_quantized(dequantize_eager, x, stored, FORMATS[name], bias), x)
    dense = results(lambda x: F.linear(x, weight, bias), x)
    assert torch.equal(ours[0], dense[0]) and torch.equal(ours[1], dense[1])
    assert [tensor.data_ptr() for tensor in ours[2]] == [stored.data_ptr()]
    ours[0].add_(1)  # the result is not a view that a Function returned


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bias", [None, torch.randn(48).bfloat16()], ids=["plain", "bias"])
def test_float8_layers_equal_layers_with_the_dequantized_weight(name: str, bias: Tensor | None) -> None:
    """Result and gradient equal a float8 layer bit for bit; the weight is saved as storage alone."""
    x, stored = torch.randn(2, 5, 256).bfloat16(), FORMATS[name].quantize(torch.randn(48, 256))
    weight = dequantize_eager(stored, name)
    dequantize = partial(dequantize_eager, name=name)
    ours = results(lambda x: linear_quantized_float8(EAGER, dequantize, x, stored, bias), x)
    dense = results(lambda x: linear_float8(EAGER, x, weight, bias), x)
    assert torch.equal(ours[0], dense[0]) and torch.equal(ours[1], dense[1])
    assert sum(tensor.nbytes for tensor in ours[2]) == stored.nbytes + 4 * 48  # and the scales


@pytest.mark.parametrize("name", NAMES)
def test_experts_equal_dense_ones(name: str) -> None:
    """Results and gradients equal dense ones, also if an expert has no rows."""
    x, stored = torch.randn(7, 128).bfloat16(), FORMATS[name].quantize(torch.randn(3, 32, 128))
    ends = torch.tensor([4, 4, 7], dtype=torch.int32)
    weight = dequantize_eager(stored, name)
    multiply = partial(multiply_quantized_experts, dequantize_eager, grouped_gemm_eager.__call__)
    ours = results(lambda x: multiply(x, stored, FORMATS[name], ends), x)
    dense = results(lambda x: grouped_gemm_eager(x, weight, ends, True), x)
    assert torch.equal(ours[0], dense[0]) and torch.equal(ours[1], dense[1])


def test_inputs_without_a_gradient_get_none() -> None:
    """A first layer, whose input needs no gradient, does not compute one."""
    stored, bias = FORMATS["nf4"].quantize(torch.randn(8, 64)), torch.zeros(8, dtype=torch.bfloat16, requires_grad=True)
    y = linear_quantized(dequantize_eager, torch.randn(3, 64).bfloat16(), stored, FORMATS["nf4"], bias)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert bias.grad is not None and torch.equal(bias.grad, torch.full((8,), 3.0).bfloat16())
