"""Cut cross entropy against its definition, in every variety."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.kernels.cross_entropy.cut import cut_cross_entropy_eager, sort_vocabulary_by_mean_logit
from drawloom.kernels.cross_entropy.options import LogitCut
from drawloom.kernels.deferral import Deferral
from support.cross_entropy import exact_losses


def losses_of(*inputs: Any, **options: Any) -> Tensor:
    """Return the losses alone."""
    losses, _ = cut_cross_entropy_eager(*inputs, **options)
    return losses


def case(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    targets = torch.randint(23, shape)
    targets.view(-1)[::3] = -100
    hidden, weight = torch.randn(*shape, 5, dtype=dtype), torch.randn(23, 5, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


CUTS = [LogitCut(), LogitCut(tile=(2, 4), max_logits=1), LogitCut(tile=(3, 4), max_logits=150)]


@pytest.mark.parametrize("cut", CUTS, ids=range(3))
@pytest.mark.parametrize("shape", [(), (8,), (2, 5), (0,), (3, 0)])
def test_losses_equal_the_definition(cut: LogitCut, shape: tuple[int, ...]) -> None:
    """For any shape and number of chunks, losses and gradients follow the definition."""
    hidden, weight, targets = case(*shape)
    actual, expected = (
        losses_of(hidden, weight, targets, cut),
        exact_losses(hidden, weight, targets),
    )
    assert actual.shape == targets.shape
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    grad = torch.randn(shape)
    grads = torch.autograd.grad(actual, (hidden, weight), grad)
    torch.testing.assert_close(
        grads, torch.autograd.grad(expected, (hidden, weight), grad.double()), atol=1e-5, rtol=1e-4
    )


def test_gradients_match_finite_differences() -> None:
    """Gradients equal finite differences in float64."""
    hidden, weight, targets = case(5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: losses_of(h, w, targets), (hidden, weight))


def test_words_are_ordered_by_mean_logit() -> None:
    """Words are in the order of their mean logits over the tokens."""
    hidden, weight, _ = case(40)
    means = (hidden @ weight.T).mean(0)
    assert (means[sort_vocabulary_by_mean_logit(hidden, weight)].diff() >= 0).all()


def test_the_filter_skips_small_gradients() -> None:
    """Gradients with a filter differ from exact ones, by less than the filter may skip."""
    hidden, weight, targets = case(12)
    scaled = (3 * weight).detach().requires_grad_()
    exact = torch.autograd.grad(losses_of(hidden, scaled, targets).sum(), (hidden, scaled))
    for filter_eps in (1e-3, 3e-2):
        cut = LogitCut(filter_eps=filter_eps, tile=(2, 2))
        actual = torch.autograd.grad(losses_of(hidden, scaled, targets, cut).sum(), (hidden, scaled))
        # A gradient of logits that is left out is less than `filter_eps`; 23 words, 12 tokens.
        assert 0 < (actual[0] - exact[0]).abs().max() < filter_eps * scaled.abs().sum(0).max()
        assert 0 < (actual[1] - exact[1]).abs().max() < filter_eps * hidden.abs().sum(0).max()


def test_the_filter_never_skips_a_target() -> None:
    """With any bound below 1, a target's gradient remains until the target is learnt."""
    hidden, weight, targets = case(6)
    cut = LogitCut(filter_eps=0.5, tile=(1, 1))
    (actual,) = torch.autograd.grad(losses_of(hidden * 0, weight, targets, cut).sum(), hidden, retain_graph=True)
    assert torch.equal(actual, torch.zeros_like(actual))
    (actual,) = torch.autograd.grad(losses_of(hidden, weight * 0.01, targets, cut).sum(), weight)
    assert actual.abs().sum() > 0


def test_ignored_tokens_have_no_gradient() -> None:
    """The loss of an ignored token has no gradient, even if the incoming gradient is infinite."""
    hidden, weight, targets = case(6)
    grad = torch.ones(6).masked_fill(targets == -100, float("inf"))
    (actual,) = torch.autograd.grad(losses_of(hidden, weight, targets), hidden, grad)
    assert actual.isfinite().all()
    assert (actual[targets == -100] == 0).all()


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_a_frozen_input_leaves_the_other_gradient_unchanged(trained: str) -> None:
    """With one input frozen, the other's gradient is the same."""
    hidden, weight, targets = case(7)
    both = dict(
        zip(
            ("hidden", "weight"),
            torch.autograd.grad(losses_of(hidden, weight, targets).sum(), (hidden, weight)),
            strict=True,
        )
    )
    inputs: Any = {"hidden": hidden.detach(), "weight": weight.detach()}
    inputs[trained].requires_grad_()
    (actual,) = torch.autograd.grad(losses_of(inputs["hidden"], inputs["weight"], targets).sum(), inputs[trained])
    torch.testing.assert_close(actual, both[trained])


def test_weight_gradient_can_be_deferred() -> None:
    """A deferred weight gradient equals an immediate one, and the gradient of hidden states is immediate."""
    hidden, weight, targets = case(7)
    expected = torch.autograd.grad(losses_of(hidden, weight, targets).sum(), (hidden, weight))
    deferral = Deferral()
    with deferral:
        losses = losses_of(hidden, weight, targets)
    with deferral.defer():
        actual = torch.autograd.grad(losses.sum(), (hidden, weight), allow_unused=True)
    assert actual[1] is None
    (later,) = deferral.take_queued_gradients()
    torch.testing.assert_close((actual[0], later.drain_and_return_remaining_grad()), expected)


@pytest.mark.parametrize("cut", CUTS, ids=range(3))
@pytest.mark.parametrize("deferred", [False, True])
def test_gradients_flow_through_losses_and_lse(cut: LogitCut, deferred: bool) -> None:
    """With factors on losses and lse, gradients equal autograd's gradients of the definition, deferred or not."""
    hidden, weight, targets = case(2, 5, dtype=torch.float64)
    grad_losses, grad_lse = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    exact = exact_losses(hidden, weight, targets), (hidden @ weight.T).logsumexp(-1)
    expected = torch.autograd.grad(exact, (hidden, weight), (grad_losses, grad_lse))
    deferral = Deferral()
    with deferral:
        actual = cut_cross_entropy_eager(hidden, weight, targets, cut)
    torch.testing.assert_close(actual, exact)
    if not deferred:
        grads = torch.autograd.grad(actual, (hidden, weight), (grad_losses, grad_lse))
        torch.testing.assert_close(grads, expected)
        return
    with deferral.defer():
        grads = torch.autograd.grad(actual, (hidden, weight), (grad_losses, grad_lse), allow_unused=True)
    assert grads[1] is None
    torch.testing.assert_close(
        (grads[0], deferral.take_queued_gradients()[0].drain_and_return_remaining_grad()), expected
    )


def test_the_filter_keeps_gradients_of_lse() -> None:
    """The loss of a target with probability 1 has no gradient, and the filter keeps its lse gradient."""
    hidden, weight = torch.eye(1, 4).mul(50).requires_grad_(), torch.eye(9, 4).requires_grad_()
    cut = LogitCut(filter_eps=0.5, tile=(1, 1))
    _, lse = cut_cross_entropy_eager(hidden, weight, torch.tensor([0]), cut)
    (actual,) = torch.autograd.grad(lse.sum(), weight)
    torch.testing.assert_close(
        actual, torch.zeros(9, 4).index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(50.0))
    )
