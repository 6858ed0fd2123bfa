"""Deferral and accumulation of weight gradients."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drawloom.kernels import deferred_grads
from drawloom.kernels.cross_entropy.cut import cut_cross_entropy_eager
from drawloom.kernels.cross_entropy.eager import linear_cross_entropy_eager
from drawloom.kernels.deferral import ChangedInPlaceError, Deferral
from drawloom.kernels.deferred_grads import Accumulation, get_weight_gradient_function
from drawloom.kernels.grouped_gemm.eager import grouped_gemm_eager
from drawloom.kernels.linear import embedding_eager, linear_eager


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(3))


def double(grad: Tensor) -> Tensor:
    return 2 * grad


def test_outside_a_recording_gradients_are_computed_at_once() -> None:
    """Without a recording, `get_weight_gradient_function` returns a function that computes."""
    grad = torch.randn(3)
    actual = get_weight_gradient_function(weight())(double, grad)
    assert actual is not None
    assert torch.equal(actual, 2 * grad)


def test_gradients_are_deferred_only_within_defer() -> None:
    """Within `defer` gradients are queued; before and after it, and for excepted weights, they are computed."""
    deferral, one, other = Deferral(), weight(), weight()
    with deferral:
        ask_one, ask_other = get_weight_gradient_function(one), get_weight_gradient_function(other)
    grad = torch.randn(3)
    assert ask_one(double, grad) is not None
    with deferral.defer(except_for=[other]):
        assert ask_one(double, grad) is None
        assert ask_other(double, grad) is not None
    assert ask_one(double, grad) is not None
    [left] = deferral.take_queued_gradients()
    assert left.weight is one and torch.equal(left.drain_and_return_remaining_grad(), 2 * grad)  # type: ignore[arg-type]
    assert deferral.take_queued_gradients() == []


def test_summands_are_added_in_their_order() -> None:
    """A weight that is used several times has one queue, whose sum is bitwise equal to autograd's."""
    deferral, one = Deferral(), weight()
    with deferral:
        uses = [get_weight_gradient_function(one) for _ in range(3)]
    grads = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    with deferral.defer():
        assert [ask(double, grad) for ask, grad in zip(uses, grads, strict=True)] == [None] * 3
    (deferred,) = deferral.take_queued_gradients()
    total = deferred.drain_and_return_remaining_grad()
    assert total is not None and total.equal(2 * grads[0] + 2 * grads[1] + 2 * grads[2])
    assert not deferred


def test_only_trainable_leaves_are_deferred() -> None:
    """Weights that are computed from others, and frozen weights, are not deferred."""
    deferral = Deferral()
    frozen = weight().requires_grad_(False)
    with deferral:
        for undeferred in (weight() * 2, frozen):
            with deferral.defer():
                assert get_weight_gradient_function(undeferred)(double, torch.randn(3)) is not None
    assert deferral.take_queued_gradients() == []


def test_recordings_nest_and_end() -> None:
    """The inner recording applies until it ends, also by an error; then the outer recording applies again."""
    outer, inner, one = Deferral(), Deferral(), weight()
    asked = []
    with outer:
        with suppress(ArithmeticError), inner:
            asked.append(get_weight_gradient_function(one))
            raise ArithmeticError
        asked.append(get_weight_gradient_function(one))
    asked.append(get_weight_gradient_function(one))
    grad = torch.randn(3)
    with outer.defer():
        assert [ask(double, grad) is None for ask in asked] == [False, True, False]
    with inner.defer():
        assert [ask(double, grad) is None for ask in asked] == [True, False, False]


def test_deferring_ends_after_a_failure() -> None:
    """After a backward pass fails within `defer`, gradients are computed at once again."""
    deferral, one = Deferral(), weight()
    with deferral:
        ask = get_weight_gradient_function(one)
    with suppress(ArithmeticError), deferral.defer():
        raise ArithmeticError
    assert ask(double, torch.randn(3)) is not None


@pytest.mark.parametrize("changed", [0, 1])
def test_changing_a_queued_tensor_in_place_is_an_error(changed: int) -> None:
    """Changing a queued tensor, or a view of its storage, raises an error that names the tensor."""
    deferral, one = Deferral(), weight()
    with deferral:
        ask = get_weight_gradient_function(one)
    tensors = torch.randn(3), torch.randn(2, 3)
    with deferral.defer():
        ask(lambda a, b: a * b.sum(0), tensors[0].view(3, 1).view(3), tensors[1].detach())
    tensors[changed].mul_(2)
    (deferred,) = deferral.take_queued_gradients()
    shape = [r"\(3,\)", r"\(2, 3\)"][changed]
    with pytest.raises(ChangedInPlaceError, match=rf"a tensor float32 {shape} was .* a weight float32 \(3,\)"):
        deferred.drain_and_return_remaining_grad()


def test_computed_summands_are_added() -> None:
    """A summand that autograd computed is queued unchanged; None queues nothing."""
    deferral, one = Deferral(), weight()
    part = torch.randn(3)
    deferred = deferral.gradient_function_for(one)
    deferred.queue_computed_summand(None)
    assert deferral.take_queued_gradients() == []
    deferred = deferral.gradient_function_for(one)
    deferred.queue_computed_summand(part)
    deferred.queue_summand(double, part)
    (deferred,) = deferral.take_queued_gradients()
    total: Any = deferred.drain_and_return_remaining_grad()
    assert torch.equal(total, part + 2 * part)


OPERATIONS: dict[str, tuple[tuple[int, ...], Callable[[nn.Parameter], Tensor]]] = {
    "linear": ((4, 4), lambda w: linear_eager(torch.ones(2, 4), w)),
    "embedding": ((4, 4), lambda w: embedding_eager(torch.tensor([1, 2]), w)),
    "grouped gemm": ((1, 4, 4), lambda w: grouped_gemm_eager(torch.ones(2, 4), w, torch.tensor([2]).int())),
    "linear cross entropy": (
        (4, 4),
        lambda w: linear_cross_entropy_eager(torch.ones(2, 4), w, torch.tensor([1, 2]))[0],
    ),
    "cut cross entropy": ((4, 4), lambda w: cut_cross_entropy_eager(torch.ones(2, 4), w, torch.tensor([1, 2]))[0]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_hook_on_a_node_sees_the_gradient_of_the_weight(name: str) -> None:
    """A hook on an operation's node may change its gradients, so none is deferred."""
    shape, operation = OPERATIONS[name]
    deferral, one = Deferral(), nn.Parameter(torch.randn(shape))
    with deferral:
        plain, hooked = operation(one), operation(one)
    node: Any = hooked.grad_fn
    while not hasattr(node, "weight_gradient"):
        ((node, _), *_) = node.next_functions
    node.register_hook(lambda grads, _: tuple(None if grad is None else grad * 3 for grad in grads))
    (expected,) = torch.autograd.grad(operation(one).sum(), one)
    with deferral.defer():
        assert list(torch.autograd.grad(plain.sum(), one, allow_unused=True)) == [None]
        (actual,) = torch.autograd.grad(hooked.sum(), one)
    torch.testing.assert_close(actual, 3 * expected)


@pytest.fixture
def fuse_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add products to gradients in their epilogue on a CPU, too."""
    monkeypatch.setattr(deferred_grads, "FUSED", {"cpu"})


def _passes(linear: nn.Parameter, inputs: list[torch.Tensor]) -> list[int]:
    """Run one backward pass per input, and return the address of the gradient after each pass."""
    addresses = []
    for x in inputs:
        with Accumulation():
            y = linear_eager(x, linear)
        y.square().sum().backward()  # type: ignore[no-untyped-call]
        assert linear.grad is not None
        addresses.append(linear.grad.data_ptr())
    return addresses


@pytest.mark.usefixtures("fuse_on_cpu")
@pytest.mark.parametrize("hooked", [False, True])
def test_products_of_bfloat16_are_summed_in_float32(hooked: bool) -> None:
    """
    Gradient accumulation sums products in float32, without rounding them to bfloat16, at one address.

    Hooks of the weight see every gradient before autograd adds it.
    """
    torch.manual_seed(0)
    linear = nn.Parameter(torch.randn(5, 7).bfloat16())
    linear.grad_dtype = torch.float32
    seen: list[torch.dtype] = []
    if hooked:
        hooks: Any = linear
        hooks.register_hook(lambda grad: seen.append(grad.dtype))
        hooks.register_post_accumulate_grad_hook(lambda _: None)
    inputs = [torch.randn(3, 7).bfloat16() for _ in range(3)]
    addresses = _passes(linear, inputs)
    outputs = [x @ linear.detach().T for x in inputs]
    expected = sum((2 * y).float().T @ x.float() for x, y in zip(inputs, outputs, strict=True))
    torch.testing.assert_close(linear.grad, expected, rtol=1e-6, atol=1e-6)
    assert len(set(addresses)) == 1 and seen == [torch.float32] * 3 * hooked


@pytest.mark.usefixtures("fuse_on_cpu")
def test_autograd_grad_returns_gradients() -> None:
    """Outside of an `Accumulation`, torch.autograd.grad returns gradients and does not change `.grad`."""
    linear, x = nn.Parameter(torch.randn(2, 3)), torch.randn(4, 3)
    linear.grad = torch.ones(2, 3)
    (grad,) = torch.autograd.grad(linear_eager(x, linear).sum(), linear)
    torch.testing.assert_close(grad, torch.ones(4, 2).T @ x)
    assert torch.equal(linear.grad, torch.ones(2, 3))
