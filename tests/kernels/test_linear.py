"""linear against torch's, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom.kernels.deferred_grads import Deferral
from drawloom.kernels.linear import linear_eager

SHAPES = [(5,), (4, 5), (2, 3, 5), (2, 1, 3, 5), (0, 5), (2, 0, 5)]


class SavedTensors:
    """A context that lists the tensors which autograd saves within it."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda each: each)

    def __enter__(self) -> list[Tensor]:
        self._hooks.__enter__()
        return self.tensors

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def _keep(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor)
        return tensor


def made(shape: tuple[int, ...], bias: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    weight = torch.randn(7, 5, dtype=dtype, requires_grad=True)
    return (x, weight, torch.randn(7, dtype=dtype, requires_grad=True)) if bias else (x, weight)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch(shape: tuple[int, ...], bias: bool) -> None:
    """Output and gradients are those of torch.nn.functional.linear, for every shape."""
    tensors = made(shape, bias)
    found, expected = linear_eager(*tensors), F.linear(*tensors)
    assert torch.equal(found, expected)
    grad = torch.randn_like(expected)
    found_grads = torch.autograd.grad(found, tensors, grad)
    expected_grads = torch.autograd.grad(expected, tensors, grad)
    torch.testing.assert_close(found_grads, expected_grads, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("bias", [False, True])
def test_strided(bias: bool) -> None:
    """A sliced, transposed input and an expanded gradient give what their copies give."""
    _, *weights = made((5,), bias)
    x = torch.randn(6, 5, 4, dtype=torch.float64, requires_grad=True)
    view = x.transpose(1, 2)[::2]
    found, expected = linear_eager(view, *weights), F.linear(view.clone(), *weights)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    grads = [torch.autograd.grad(y.sum(), (x, *weights)) for y in (found, expected)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Output and gradients keep the dtype, and are rounded once."""
    tensors = made((64, 5), True, dtype)
    found = linear_eager(*tensors)
    grad = torch.randn_like(found)
    grads = torch.autograd.grad(found, tensors, grad)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    exact = torch.autograd.grad(F.linear(*wide), wide, grad.double())
    assert {each.dtype for each in (found, *grads)} == {dtype}
    for one, other in zip(grads, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0.01, atol=0.02)


@pytest.mark.parametrize(
    "learns", [(True, False, False), (False, True, False), (False, False, True), (True, True, False)]
)
def test_frozen(learns: tuple[bool, ...]) -> None:
    """Only trainable tensors get a gradient, and tensors that no gradient needs are not saved."""
    tensors = [each.detach().requires_grad_(learn) for each, learn in zip(made((4, 5), True), learns, strict=True)]
    wanted = [each for each in tensors if each.requires_grad]
    with SavedTensors() as kept:
        found = linear_eager(*tensors)
    grads = torch.autograd.grad(found.sum(), wanted)
    torch.testing.assert_close(grads, torch.autograd.grad(F.linear(*tensors).sum(), wanted))
    assert len(kept) == sum(learns[:2])


def test_output_may_be_changed_in_place() -> None:
    """As with torch's, an activation may overwrite the output, with a bias or without."""
    for bias in (False, True):
        tensors = made((2, 3, 5), bias)
        found = torch.autograd.grad(linear_eager(*tensors).relu_().sum(), tensors)
        torch.testing.assert_close(found, torch.autograd.grad(F.linear(*tensors).relu().sum(), tensors))


def test_weight_gradient_can_be_deferred() -> None:
    """Within `defer`, only input and bias get gradients at once; the weight's is computed later, bitwise the same."""
    tensors = made((2, 3, 5), True)
    grad = torch.randn(2, 3, 7, dtype=torch.float64)
    expected = torch.autograd.grad(linear_eager(*tensors), tensors, grad)
    deferral = Deferral()
    with deferral:
        found = linear_eager(*tensors)
    with deferral.defer():
        grads = torch.autograd.grad(found, tensors, grad, allow_unused=True)
    (deferred,) = deferral.take()
    assert grads[1] is None
    assert deferred.weight is tensors[1]
    assert torch.equal(deferred.compute(), expected[1])
    assert torch.equal(grads[0], expected[0])
    assert torch.equal(grads[2], expected[2])


def test_compiles_without_a_break() -> None:
    """Under torch.compile it is torch's own operation."""
    tensors = made((2, 3, 5), True)
    compiled = torch.compile(linear_eager, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*tensors), F.linear(*tensors))


def test_saves_its_inputs_without_a_copy() -> None:
    """What autograd saves is the storage of input and weight."""
    x, layer = torch.randn(4, 5, requires_grad=True), nn.Linear(5, 7)
    with SavedTensors() as kept:
        linear_eager(x, layer.weight, layer.bias)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr(), layer.weight.data_ptr()]


def test_complex_gradients_are_conjugate() -> None:
    """Complex inputs and weights have the gradients of torch's own product."""
    x, weight, grad = (
        torch.randn(4, 4, dtype=torch.complex128, requires_grad=learns) for learns in (True, True, False)
    )
    found = torch.autograd.grad(linear_eager(x, weight), [x, weight], grad)
    torch.testing.assert_close(found, torch.autograd.grad(x @ weight.T, [x, weight], grad))
