"""Linear layers in float8 against float64 products, and against the rules of the GPU's products on the meta device."""

import copy

import pytest
import torch
from torch import Tensor, nn

from drawloom.kernels.deferred_grads import Accumulation, Deferral
from drawloom.kernels.float8 import E4M3, EagerFloat8, Float8Rows, linear_float8, linear_float8_eager, scale_of
from drawloom.kernels.linear import linear_eager
from drawloom.kernels.recompute import Selective, rerun
from drawloom.kernels.rms_norm import rms_norm_eager

TOKENS, INPUTS, OUTPUTS = 37, 64, 48


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).bfloat16().requires_grad_()


def quantize(x: Tensor, dim: int) -> Tensor:
    """Return x, float64, rounded to e4m3 with the largest power-of-two scale along a dimension: torchao's formula."""
    largest = x.abs().amax(dim, keepdim=True).clamp_min(1e-12)
    scale = torch.exp2(torch.log2(448 / largest).floor())
    return (x * scale).float().to(E4M3).double() / scale


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double() - expected).norm() / expected.norm())


def gradients(layer: object, *leaves: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    y = layer(*leaves)  # type: ignore[operator]
    return (y, *torch.autograd.grad(y, leaves, grad))


def test_scales_are_the_smallest_powers_of_two_without_overflow() -> None:
    """A row's largest element, divided by its scale, is above 224 and at most 448, also next to a power of two."""
    edges = torch.tensor([448.0, 224.0, 1.75, 1.0, 3e38, 1e-20])
    largest = torch.cat([edges, edges.nextafter(torch.tensor(torch.inf)), edges.nextafter(torch.tensor(0.0))])
    scale = scale_of(largest)
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert ((largest / scale > 224) & (largest / scale <= 448)).all()
    assert scale_of(torch.zeros(1)).isfinite().all() and (0 / scale_of(torch.zeros(1)) == 0).all()
    assert scale_of(torch.tensor([torch.inf, torch.nan])).isnan().all()


def test_forward_pass_multiplies_rounded_rows() -> None:
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


def test_exact_operands_equal_bfloat16() -> None:
    """Small integers times a power of two for each row lose nothing: results and gradients are as in bfloat16."""
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


class CountedFloat8(EagerFloat8):
    """Eager casts that record the shapes of the tensors that they round."""

    def __init__(self) -> None:
        self.shapes: list[torch.Size] = []

    def quantize(self, x: Tensor, transposed: bool) -> Float8Rows:
        self.shapes.append(x.shape)
        return super().quantize(x, transposed)


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


def test_deferred_gradients_equal_undeferred_ones() -> None:
    """A split backward pass, and accumulation over two microbatches, have the bits of plain backward passes."""
    weight, batches = draw(OUTPUTS, INPUTS), [draw(TOKENS, INPUTS) for _ in range(2)]
    weight.grad_dtype = torch.float32
    sums = []
    for kind in (None, Deferral, Accumulation):
        weight.grad = None
        for x in batches:
            if kind is Deferral:
                deferral = Deferral()
                with deferral:
                    y = linear_float8_eager(x, weight)
                with deferral.defer():
                    torch.autograd.backward(y.square().sum())
                for deferred in deferral.take():
                    part = deferred.compute()
                    assert part is not None
                    weight.grad = part.float() if weight.grad is None else weight.grad + part.float()
                continue
            with kind() if kind is not None else torch.enable_grad():
                y = linear_float8_eager(x, weight)
            torch.autograd.backward(y.square().sum())
        sums.append(weight.grad)
    plain, *others = [total for total in sums if total is not None]
    assert plain.dtype == torch.float32 and len(others) == 2
    assert all(torch.equal(plain, other) for other in others)


@pytest.mark.parametrize("policy", ["selective", "rerun"])
def test_recomputed_layers_have_the_bits_of_kept_ones(policy: str) -> None:
    """Rounding is a function of the data alone, so that recomputation changes no gradient; it keeps less."""
    x, norm, weight = draw(TOKENS, INPUTS), draw(INPUTS), draw(OUTPUTS, INPUTS)
    grad = draw(TOKENS, OUTPUTS).detach()

    def layer(x: Tensor) -> Tensor:
        from drawloom.kernels.recompute import cheap

        return linear_float8_eager(cheap(rms_norm_eager, x, norm, 1e-6), weight)

    expected = torch.autograd.grad(layer(x), (x, norm, weight), grad)
    if policy == "selective":
        with Selective():
            y = layer(x)
    else:
        y = rerun(layer, x)
    for left, right in zip(torch.autograd.grad(y, (x, norm, weight), grad), expected, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_products_have_the_layouts_that_gpus_multiply(tokens: int) -> None:
    """On the meta device torch applies CUDA's rules of layout and alignment to each product, for any tokens."""
    pytest.importorskip("triton")
    from drawloom.kernels.triton.float8 import linear_float8_triton

    with torch.device("meta"):
        x, weight, bias = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((2, tokens, 64), (48, 64), (48,)))
        leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
        y = linear_float8_triton(*leaves)
        grads = torch.autograd.grad(y, leaves, torch.empty_like(y))
    assert y.shape == (2, tokens, 48)
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves]


def test_other_dtypes_and_widths_are_refused() -> None:
    """Operands in float32, and widths that tensor cores can't multiply, are errors instead of other numbers."""
    with pytest.raises(TypeError, match="round bfloat16"):
        linear_float8_eager(torch.ones(4, 16), torch.ones(16, 16))
    with pytest.raises(ValueError, match="not divisible by 16"):
        linear_float8_eager(draw(4, 24), draw(16, 24))


def test_modules_with_rounded_inputs_can_be_copied() -> None:
    """Rounded rows belong to a tensor in one pass, and do not hinder copies of modules."""
    module = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
    linear_float8_eager(draw(4, 16), module.weight)
    assert torch.equal(copy.deepcopy(module).weight, module.weight)
