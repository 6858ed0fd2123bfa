"""linear against torch.nn.functional.linear, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom.kernels.deferral import Deferral
from drawloom.kernels.linear import linear_eager

SHAPES = [(5,), (4, 5), (2, 3, 5), (2, 1, 3, 5), (0, 5), (2, 0, 5)]


class SavedTensors:
    """Context that lists the tensors saved by autograd."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def __enter__(self) -> list[Tensor]:
        self._hooks.__enter__()
        return self.tensors

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def _keep(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor)
        return tensor


def random_inputs(shape: tuple[int, ...], bias: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    weight = torch.randn(7, 5, dtype=dtype, requires_grad=True)
    return (x, weight, torch.randn(7, dtype=dtype, requires_grad=True)) if bias else (x, weight)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_equals_torch(shape: tuple[int, ...], bias: bool) -> None:
    """Output and gradients equal torch.nn.functional.linear for every shape."""
    tensors = random_inputs(shape, bias)
    actual, expected = linear_eager(*tensors), F.linear(*tensors)
    assert torch.equal(actual, expected)
    grad = torch.randn_like(expected)
    actual_grads = torch.autograd.grad(actual, tensors, grad)
    expected_grads = torch.autograd.grad(expected, tensors, grad)
    torch.testing.assert_close(actual_grads, expected_grads, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("bias", [False, True])
def test_strided_inputs_give_the_same_result(bias: bool) -> None:
    """A sliced, transposed input and an expanded gradient give the same results as contiguous copies."""
    _, *weights = random_inputs((5,), bias)
    x = torch.randn(6, 5, 4, dtype=torch.float64, requires_grad=True)
    view = x.transpose(1, 2)[::2]
    actual, expected = linear_eager(view, *weights), F.linear(view.clone(), *weights)
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)
    grads = [torch.autograd.grad(y.sum(), (x, *weights)) for y in (actual, expected)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_agrees_with_float64(dtype: torch.dtype) -> None:
    """Output and gradients keep the dtype, and are rounded once."""
    tensors = random_inputs((64, 5), True, dtype)
    actual = linear_eager(*tensors)
    grad = torch.randn_like(actual)
    grads = torch.autograd.grad(actual, tensors, grad)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    exact = torch.autograd.grad(F.linear(*wide), wide, grad.double())
    assert {tensor.dtype for tensor in (actual, *grads)} == {dtype}
    for one, other in zip(grads, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0.01, atol=0.02)


@pytest.mark.parametrize(
    "learns", [(True, False, False), (False, True, False), (False, False, True), (True, True, False)]
)
def test_frozen_tensors_get_no_gradient(learns: tuple[bool, ...]) -> None:
    """Only trainable tensors get a gradient, and tensors without use in a gradient are not saved."""
    tensors = [
        tensor.detach().requires_grad_(learn) for tensor, learn in zip(random_inputs((4, 5), True), learns, strict=True)
    ]
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    with SavedTensors() as kept:
        actual = linear_eager(*tensors)
    grads = torch.autograd.grad(actual.sum(), trained)
    torch.testing.assert_close(grads, torch.autograd.grad(F.linear(*tensors).sum(), trained))
    assert len(kept) == sum(learns[:2])


def test_output_may_be_changed_in_place() -> None:
    """An activation may overwrite the output, with a bias or without, as with torch's linear."""
    for bias in (False, True):
        tensors = random_inputs((2, 3, 5), bias)
        actual = torch.autograd.grad(linear_eager(*tensors).relu_().sum(), tensors)
        torch.testing.assert_close(actual, torch.autograd.grad(F.linear(*tensors).relu().sum(), tensors))


def test_weight_gradient_can_be_deferred() -> None:
    """Within `defer`, input and bias get gradients at once; the weight's gradient comes later, bitwise the same."""
    tensors = random_inputs((2, 3, 5), True)
    grad = torch.randn(2, 3, 7, dtype=torch.float64)
    expected = torch.autograd.grad(linear_eager(*tensors), tensors, grad)
    deferral = Deferral()
    with deferral:
        actual = linear_eager(*tensors)
    with deferral.defer():
        grads = torch.autograd.grad(actual, tensors, grad, allow_unused=True)
    (deferred,) = deferral.take_queued_gradients()
    assert grads[1] is None
    assert deferred.weight is tensors[1]
    assert torch.equal(deferred.drain_and_return_remaining_grad(), expected[1])
    assert torch.equal(grads[0], expected[0])
    assert torch.equal(grads[2], expected[2])


def test_linear_compiles_without_breaks() -> None:
    """Under torch.compile, linear is torch's own operation."""
    tensors = random_inputs((2, 3, 5), True)
    compiled = torch.compile(linear_eager, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*tensors), F.linear(*tensors))


def test_inputs_are_saved_without_a_copy() -> None:
    """Autograd saves the storages of input and weight."""
    x, layer = torch.randn(4, 5, requires_grad=True), nn.Linear(5, 7)
    with SavedTensors() as kept:
        linear_eager(x, layer.weight, layer.bias)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr(), layer.weight.data_ptr()]


def test_complex_gradients_are_conjugated() -> None:
    """Complex gradients equal the gradients of torch's product."""
    x, weight, grad = (
        torch.randn(4, 4, dtype=torch.complex128, requires_grad=learns) for learns in (True, True, False)
    )
    actual = torch.autograd.grad(linear_eager(x, weight), [x, weight], grad)
    torch.testing.assert_close(actual, torch.autograd.grad(x @ weight.T, [x, weight], grad))
