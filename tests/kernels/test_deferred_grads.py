"""Weight gradients wait where they are told to, and only there."""

from contextlib import suppress

import torch
from torch import Tensor, nn

from drawloom.kernels.deferred_grads import Deferral, weight_gradient_of


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(3))


def double(grad: Tensor) -> Tensor:
    return 2 * grad


def test_outside_a_recording_nothing_waits() -> None:
    """The gradient is computed when it is asked for."""
    grad = torch.randn(3)
    found = weight_gradient_of(weight())(double, grad)
    assert found is not None
    assert torch.equal(found, 2 * grad)


def test_waits_only_while_putting_off() -> None:
    """Within `putting_off` gradients wait; before and after it, and for spared weights, they are computed."""
    deferral, one, other = Deferral(), weight(), weight()
    with deferral.recording():
        ask_one, ask_other = weight_gradient_of(one), weight_gradient_of(other)
    grad = torch.randn(3)
    assert ask_one(double, grad) is not None
    with deferral.defer(except_for=[other]):
        assert ask_one(double, grad) is None
        assert ask_other(double, grad) is not None
    assert ask_one(double, grad) is not None
    assert [(each.weight, each.compute().equal(2 * grad)) for each in deferral.take()] == [(one, True)]
    assert deferral.take() == []


def test_parts_are_summed_in_their_order() -> None:
    """A weight that is used several times waits in one place, for the sum that autograd would have made."""
    deferral, one = Deferral(), weight()
    with deferral.recording():
        uses = [weight_gradient_of(one) for _ in range(3)]
    grads = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    with deferral.defer():
        assert [ask(double, grad) for ask, grad in zip(uses, grads, strict=True)] == [None] * 3
    (put_off,) = deferral.take()
    assert put_off.compute().equal(2 * grads[0] + 2 * grads[1] + 2 * grads[2])
    assert not put_off


def test_only_leaves_that_learn_can_wait() -> None:
    """A weight that is computed from others passes its gradient on at once; a frozen one has none."""
    deferral = Deferral()
    frozen = weight().requires_grad_(False)
    with deferral.recording():
        for each in (weight() * 2, frozen):
            with deferral.defer():
                assert weight_gradient_of(each)(double, torch.randn(3)) is not None
    assert not deferral.known


def test_recordings_nest_and_end() -> None:
    """The inner one counts, and the outer one again after it, also when the forward pass fails."""
    outer, inner, one = Deferral(), Deferral(), weight()
    with outer.recording():
        with suppress(ArithmeticError), inner.recording():
            weight_gradient_of(one)
            raise ArithmeticError
        assert (id(one) in outer.known, id(one) in inner.known) == (False, True)
        weight_gradient_of(one)
    assert id(one) in outer.known
    fresh = weight()
    weight_gradient_of(fresh)
    assert id(fresh) not in outer.known


def test_putting_off_ends_after_a_failure() -> None:
    """A backward pass that fails leaves gradients to be computed again."""
    deferral, one = Deferral(), weight()
    with deferral.recording():
        ask = weight_gradient_of(one)
    with suppress(ArithmeticError), deferral.defer():
        raise ArithmeticError
    assert ask(double, torch.randn(3)) is not None
