"""
Linear layers and feed-forward networks in float8 against float64 products, and against the rules of the GPU's products
on the meta device.
"""

import copy
from collections.abc import Callable
from functools import partial
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from drawloom.kernels.deferral import Deferral
from drawloom.kernels.deferred_grads import Accumulation
from drawloom.kernels.float8.eager import E4M3, EAGER, Float8Kernels, Float8Rows
from drawloom.kernels.float8.linear import (
    CachedFloat8Weights,
    linear_float8,
    linears_float8,
    mlp_float8,
    rms_norm_float8,
)
from drawloom.kernels.gates.eager import swiglu_eager
from drawloom.kernels.linear import linear_eager
from drawloom.kernels.recompute.marks import call_recomputable
from drawloom.kernels.recompute.repeated_calls import call_with_recomputation
from drawloom.kernels.recompute.selective import Selective
from drawloom.kernels.rms_norm.eager import rms_norm_eager

TOKENS, INPUTS, OUTPUTS = 37, 64, 48


def linear_float8_eager(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear_float8(EAGER, x, weight, bias)


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).bfloat16().requires_grad_()


def draw_network() -> list[Tensor]:
    """Return the weights of gate, up and down for inputs of INPUTS channels."""
    return [draw(96, INPUTS, scale=0.2), draw(96, INPUTS, scale=0.2), draw(OUTPUTS, 96, scale=0.2)]


def network(x: Tensor, *weights: Tensor) -> Tensor:
    return mlp_float8(EAGER, x, *weights)


def side_by_side(x: Tensor, *weights: Tensor) -> Tensor:
    return torch.cat(linears_float8(EAGER, x, weights), -1)


def quantize(x: Tensor, dim: int) -> Tensor:
    """Return x, float64, rounded to e4m3 with the largest power-of-two scale along a dimension: torchao's formula."""
    largest = x.abs().amax(dim, keepdim=True).clamp_min(1e-12)
    scale = torch.exp2(torch.log2(448 / largest).floor())
    return (x * scale).float().to(E4M3).double() / scale


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double() - expected.detach()).norm() / expected.detach().norm())


def gradients(layer: object, *leaves: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    y = layer(*leaves)  # type: ignore[operator]
    return (y, *torch.autograd.grad(y, leaves, grad))


def test_forward_pass_multiplies_quantized_rows() -> None:
    """The result is the float64 product of the rounded operands, rounded to bfloat16 once."""
    x, weight = draw(TOKENS, INPUTS), draw(OUTPUTS, INPUTS, scale=0.02)
    exact = quantize(x.detach().double(), 1) @ quantize(weight.detach().double(), 1).t()
    assert relative_error(linear_float8_eager(x, weight), exact) < 2**-8


def test_gradients_are_as_precise_as_one_rounding_of_each_operand() -> None:
    """Gradients differ from the exact ones by the error of two rounded operands, although scales are folded."""
    x, weight, grad = draw(512, INPUTS), draw(OUTPUTS, INPUTS), draw(512, OUTPUTS).detach()
    with torch.no_grad():
        x *= torch.exp2(torch.randint(-8, 8, (512, 1)))
        weight *= torch.exp2(torch.randint(-3, 3, (OUTPUTS, 1)))
        grad *= torch.exp2(torch.randint(-8, 8, (512, 1)))
    _, grad_x, grad_weight = gradients(linear_float8_eager, x, weight, grad=grad)
    wide_x, wide_weight, wide = (tensor.detach().double() for tensor in (x, weight, grad))
    exact_x, exact_weight = wide @ wide_weight, wide.t() @ wide_x
    errors = (grad_x.double() - exact_x).norm(dim=1) / exact_x.norm(dim=1)
    assert errors.median() < 0.045
    assert relative_error(grad_weight, exact_weight) < 0.045


def test_exact_operands_give_the_bits_of_bfloat16() -> None:
    """Small integers times a power of two for each row lose nothing: results and gradients equal bfloat16's."""
    leaves = [torch.randint(-4, 5, (rows, 32)).bfloat16() for rows in (48, 16)]
    for leaf in leaves:
        leaf *= torch.exp2(torch.randint(-3, 3, (len(leaf), 1)))
        leaf.requires_grad_()
    grad = torch.randint(-1, 2, (48, 16)).bfloat16()
    actual = gradients(linear_float8_eager, *leaves, grad=grad)
    expected = gradients(linear_eager, *leaves, grad=grad)
    for left, right in zip(actual, expected, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("power", [-20, 3])
def test_powers_of_two_of_a_row_change_nothing_else(power: int) -> None:
    """Scaling one token by a power of two scales its own result and gradients, and leaves all others bit for bit."""
    x, weight, grad = draw(TOKENS, INPUTS), draw(OUTPUTS, INPUTS), draw(TOKENS, OUTPUTS).detach()
    scaled, factor = x.detach().clone(), 2.0**power
    scaled[5] *= factor
    y, grad_x, _ = gradients(linear_float8_eager, x, weight, grad=grad)
    other, other_grad, _ = gradients(linear_float8_eager, scaled.requires_grad_(), weight, grad=grad)
    y = y.detach().clone()
    y[5] *= factor
    assert torch.equal(other, y) and torch.equal(other_grad, grad_x)


def test_a_bias_is_added_and_has_the_gradient_of_a_sum() -> None:
    """The bias is added to the product in bfloat16."""
    x, weight, bias, grad = draw(TOKENS, INPUTS), draw(OUTPUTS, INPUTS), draw(OUTPUTS), draw(TOKENS, OUTPUTS)
    y, _, _, grad_bias = gradients(linear_float8_eager, x, weight, bias, grad=grad.detach())
    assert torch.equal(y, linear_float8_eager(x, weight) + bias)
    assert torch.equal(grad_bias, grad.detach().sum(0))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_numbers_that_are_not_finite_reach_all_gradients(value: float) -> None:
    """An infinite or undefined gradient makes the weight's gradient NaN, so that the step is skipped."""
    x, weight, grad = draw(TOKENS, INPUTS), draw(OUTPUTS, INPUTS), draw(TOKENS, OUTPUTS).detach()
    grad[2, 3] = value
    _, grad_x, grad_weight = gradients(linear_float8_eager, x, weight, grad=grad)
    assert grad_x[2].isnan().all() and not grad_x[:2].isnan().any()
    assert grad_weight.isnan().all()


class CountedFloat8(Float8Kernels):
    """Eager casts that record the shapes of rounded tensors."""

    def __init__(self) -> None:
        self.shapes: list[torch.Size] = []

    def quantize_rows(self, x: Tensor, transposed: bool) -> Float8Rows:
        self.shapes.append(x.shape)
        return super().quantize_rows(x, transposed)


def test_layers_of_one_tensor_round_it_once() -> None:
    """Projections of the same tensor share its rounded rows, until the tensor is changed in place."""
    kernels = CountedFloat8()
    x, weights = draw(TOKENS, INPUTS).detach(), [draw(OUTPUTS, INPUTS) for _ in "qkv"]
    for weight in weights:
        linear_float8(kernels, x, weight, None)
    assert kernels.shapes.count(x.shape) == 1
    x *= 2
    y = linear_float8(kernels, x, weights[0], None)
    assert relative_error(y, (x.double() @ weights[0].double().t()).detach()) < 0.05


@pytest.mark.parametrize("layer", [linear_float8_eager, network, side_by_side])
def test_kept_weights_have_the_bits_of_weights_rounded_in_every_pass(layer: Callable[..., Tensor]) -> None:
    """Weights that keep their float8 elements give the same bits, also after an update with or without a version."""
    plain = draw_network()[: {linear_float8_eager: 1, side_by_side: 2, network: 3}[layer]]
    kept = [weight.detach().clone().requires_grad_() for weight in plain]
    groups = [kept[:2], kept[2:]] if layer is network else [kept]
    operations = [CachedFloat8Weights(group) for group in groups]
    for update in ("none", "counted", "silent"):
        for weight in (*plain, *kept) if update != "none" else ():
            with torch.no_grad():
                weight.mul_(0.7) if update == "counted" else weight.data.mul_(0.7)
        for operation in operations if update == "silent" else ():
            operation.requantize()
        x, addresses = draw(TOKENS, INPUTS), [operation.rows.data.data_ptr() for operation in operations]
        y = layer(x, *plain)
        grad = torch.randn_like(y)
        expected = torch.autograd.grad(y, [x, *plain], grad)
        actual = torch.autograd.grad(layer(x, *kept), [x, *kept], grad)
        assert all(torch.equal(left, right) for left, right in zip(actual, expected, strict=True))
        # Captured CUDA graphs read the same addresses in every step.
        assert addresses == [operation.rows.data.data_ptr() for operation in operations]
        assert all(operation.is_current for operation in operations)


def test_norms_hand_on_their_quantized_rows() -> None:
    """Layers after a norm that rounds its result do not round it again, and have the same bits."""
    x, norm, weight = draw(TOKENS, INPUTS), draw(INPUTS), draw(OUTPUTS, INPUTS)
    results = []
    for float8 in (True, False):
        kernels = CountedFloat8()
        normed = rms_norm_eager(x, norm, 1e-6)
        if float8:
            normed, _ = rms_norm_float8(EAGER, x, None, norm, 1e-6, False)
        y = linear_float8(kernels, normed, weight)
        assert kernels.shapes.count(x.shape) == (not float8)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, norm, weight))))
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


def test_quantized_rows_do_not_live_as_long_as_their_input() -> None:
    """Inputs that autograd keeps for adapters keep no rounded copies, except the two inputs that were used last."""
    kernels, weight = CountedFloat8(), draw(OUTPUTS, INPUTS).detach()
    inputs = [draw(TOKENS, INPUTS) for _ in range(5)]
    copies: list[ref[Tensor]] = []

    def multiply(x: Tensor) -> None:
        linear_float8(kernels, x, weight)
        copies.append(ref(x.float8().rows.data))  # type: ignore[attr-defined]

    for x in inputs:
        multiply(x)
    assert [copy() is not None for copy in copies] == [False, False, False, True, True]


def test_frozen_weights_keep_no_input() -> None:
    """A frozen weight, as under LoRA, has a graph that keeps neither the input nor its rounded copy."""
    x, weight = draw(TOKENS, INPUTS), draw(OUTPUTS, INPUTS).detach()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = linear_float8_eager(x, weight)
    assert all(tensor.shape != x.shape and tensor.shape[0] != INPUTS for tensor in kept)
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def test_networks_are_as_precise_as_their_layers() -> None:
    """A feed-forward network's result and gradients are as close to float64 as its layers' one by one."""
    x, weights, grad = draw(256, INPUTS), draw_network(), draw(256, OUTPUTS).detach()
    with torch.no_grad():
        x *= torch.exp2(torch.randint(-2, 2, (256, 1)))
        grad *= torch.exp2(torch.randint(-8, 8, (256, 1)))

    def by_layers(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        inner = swiglu_eager(linear_float8_eager(x, gate), linear_float8_eager(x, up))
        return linear_float8_eager(inner, down)

    def exact(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()

    wide = [leaf.detach().double().requires_grad_() for leaf in (x, *weights)]
    expected = gradients(exact, *wide, grad=grad.double())
    whole = gradients(partial(mlp_float8, EAGER), x, *weights, grad=grad)
    parts = gradients(by_layers, x, *weights, grad=grad)
    for actual, other, right in zip(whole, parts, expected, strict=True):
        assert relative_error(actual, right) < 1.1 * relative_error(other, right)


def test_networks_save_no_inner_tensor_in_bfloat16() -> None:
    """A feed-forward network saves the outputs of gate and up once, and everything else of its width in float8."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    x, weights = draw(TOKENS, INPUTS), draw_network()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mlp_float8(EAGER, x, *weights)
    activations = [t for t in kept.values() if t.dtype == torch.bfloat16 and not any(t is w for w in weights)]
    assert [tensor.shape for tensor in activations] == [(TOKENS, 2 * 96)]


def test_layers_of_one_input_equal_separate_layers() -> None:
    """Layers with one input have the results of separate layers, and gradients as precise."""
    x, weights, grad = draw(256, INPUTS), draw_network()[:2], draw(256, 192).detach()
    with torch.no_grad():
        grad *= torch.exp2(torch.randint(-8, 8, (256, 1)))
    whole = gradients(side_by_side, x, *weights, grad=grad)
    stacked = torch.cat([weight.detach() for weight in weights]).requires_grad_()
    y, grad_x, grad_weight = gradients(linear_float8_eager, x, stacked, grad=grad)
    for actual, expected in zip(whole, (y, grad_x, *torch.split(grad_weight, 96)), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("layer", [linear_float8_eager, network, side_by_side])
def test_deferred_gradients_equal_undeferred_ones(layer: Callable[..., Tensor]) -> None:
    """A split backward pass, and accumulation over two microbatches, have the bits of plain backward passes."""
    weights = draw_network()[: {linear_float8_eager: 1, side_by_side: 2, network: 3}[layer]]
    batches = [draw(TOKENS, INPUTS) for _ in range(2)]
    for weight in weights:
        weight.grad_dtype = torch.float32
    sums = []
    for kind in (None, Deferral, Accumulation):
        for weight in weights:
            weight.grad = None
        for x in batches:
            if kind is Deferral:
                deferral = Deferral()
                with deferral:
                    y = layer(x, *weights)
                with deferral.defer():
                    torch.autograd.backward(y.square().sum())
                for deferred in deferral.take_queued_gradients():
                    part = deferred.drain_and_return_remaining_grad()
                    assert part is not None
                    weight = deferred.weight
                    weight.grad = part.float() if weight.grad is None else weight.grad + part.float()
                continue
            with kind() if kind is not None else torch.enable_grad():
                y = layer(x, *weights)
            torch.autograd.backward(y.square().sum())
        sums.append([weight.grad for weight in weights])
    plain, *others = [[grad for grad in grads if grad is not None] for grads in sums]
    assert all(grad.dtype == torch.float32 for grad in plain) and len(plain) == len(weights) and len(others) == 2
    assert all(torch.equal(left, right) for other in others for left, right in zip(plain, other, strict=True))


@pytest.mark.parametrize("policy", ["selective", "rerun"])
def test_recomputed_layers_have_the_bits_of_kept_ones(policy: str) -> None:
    """Rounding is a function of the data alone, so that recomputation changes no gradient; it keeps less."""
    x, norm, weight = draw(TOKENS, INPUTS), draw(INPUTS), draw(OUTPUTS, INPUTS)
    grad = draw(TOKENS, OUTPUTS).detach()

    network = [draw(96, INPUTS), draw(96, INPUTS), draw(INPUTS, 96, scale=0.2)]

    def layer(x: Tensor) -> Tensor:
        inner = mlp_float8(EAGER, call_recomputable(rms_norm_eager, x, norm, 1e-6), *network)
        return linear_float8_eager(call_recomputable(rms_norm_eager, inner, norm, 1e-6), weight)

    leaves = x, norm, weight, *network
    expected = torch.autograd.grad(layer(x), leaves, grad)
    if policy == "selective":
        with Selective():
            y = layer(x)
    else:
        y = call_with_recomputation(layer, x)
    for left, right in zip(torch.autograd.grad(y, leaves, grad), expected, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_products_have_the_layouts_that_gpus_multiply(tokens: int) -> None:
    """On the meta device torch applies CUDA's rules of layout and alignment to each product, for any tokens."""
    pytest.importorskip("triton")
    from drawloom.kernels.float8.triton import TRITON

    with torch.device("meta"):
        x, weight, bias = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((2, tokens, 64), (48, 64), (48,)))
        leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
        network = [torch.empty(*shape, dtype=x.dtype).requires_grad_() for shape in ((48, 64), (48, 64), (64, 48))]
        for function, arguments in ((linear_float8, leaves), (mlp_float8, [x, *network])):
            y = function(TRITON, *arguments)
            grads = torch.autograd.grad(y, arguments, torch.empty_like(y))
            assert y.shape[:2] == (2, tokens)
            assert [grad.shape for grad in grads] == [leaf.shape for leaf in arguments]


def test_other_dtypes_and_widths_are_refused() -> None:
    """Operands in float32, and widths that tensor cores can't multiply, are errors instead of other numbers."""
    with pytest.raises(TypeError, match="need bfloat16"):
        linear_float8_eager(torch.ones(4, 16), torch.ones(16, 16))
    with pytest.raises(ValueError, match="not divisible by 16"):
        linear_float8_eager(draw(4, 24), draw(16, 24))


def test_modules_with_rounded_inputs_can_be_copied() -> None:
    """Rounded rows belong to a tensor of one pass, and do not hinder copies of modules."""
    module = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
    linear_float8_eager(draw(4, 16), module.weight)
    assert torch.equal(copy.deepcopy(module).weight, module.weight)
