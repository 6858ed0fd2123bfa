"""Cut cross entropy against all logits at once, in every variety."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.kernels.cut_cross_entropy import LogitCut, cut_cross_entropy_eager, order_of_vocab
from drawloom.kernels.deferred_grads import Deferral


def losses_of(*inputs: Any, **options: Any) -> Tensor:
    """The losses alone."""
    losses, _ = cut_cross_entropy_eager(*inputs, **options)
    return losses


def at_once(hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int = -100) -> Tensor:
    """By the definition: -log of the target's share of exp(logits)."""
    logits = hidden.double() @ weight.double().T
    chosen = logits.gather(-1, targets.where(targets != ignored, 0).unsqueeze(-1)).squeeze(-1)
    return (logits.logsumexp(-1) - chosen).where(targets != ignored, 0)


def case(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    targets = torch.randint(23, shape)
    targets.view(-1)[::3] = -100
    hidden, weight = torch.randn(*shape, 5, dtype=dtype), torch.randn(23, 5, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


CUTS = [LogitCut(), LogitCut(tile=(2, 4), max_logits=1), LogitCut(tile=(3, 4), max_logits=150)]


@pytest.mark.parametrize("cut", CUTS, ids=range(3))
@pytest.mark.parametrize("shape", [(), (8,), (2, 5), (0,), (3, 0)])
def test_equals_definition(cut: LogitCut, shape: tuple[int, ...]) -> None:
    """Any shape, in however many chunks, gives losses and gradients of the definition."""
    hidden, weight, targets = case(*shape)
    found, expected = (
        losses_of(hidden, weight, targets, cut),
        at_once(hidden, weight, targets),
    )
    assert found.shape == targets.shape
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    grad = torch.randn(shape)
    grads = torch.autograd.grad(found, (hidden, weight), grad)
    torch.testing.assert_close(
        grads, torch.autograd.grad(expected, (hidden, weight), grad.double()), atol=1e-5, rtol=1e-4
    )


def test_gradients() -> None:
    """Gradients are those of finite differences in float64."""
    hidden, weight, targets = case(5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: losses_of(h, w, targets), (hidden, weight))


def test_words_by_mean_logit() -> None:
    """The order is that of each word's mean logit over the tokens."""
    hidden, weight, _ = case(40)
    means = (hidden @ weight.T).mean(0)
    assert (means[order_of_vocab(hidden, weight)].diff() >= 0).all()


def test_filter_leaves_out_what_is_small() -> None:
    """Gradients with a filter differ from exact ones by less than what the filter may drop, and by something."""
    hidden, weight, targets = case(12)
    scaled = (3 * weight).detach().requires_grad_()
    exact = torch.autograd.grad(losses_of(hidden, scaled, targets).sum(), (hidden, scaled))
    for least in (1e-3, 3e-2):
        cut = LogitCut(filter_eps=least, tile=(2, 2))
        found = torch.autograd.grad(losses_of(hidden, scaled, targets, cut).sum(), (hidden, scaled))
        # A gradient of logits that is left out is less than `least`; 23 words, 12 tokens.
        assert 0 < (found[0] - exact[0]).abs().max() < least * scaled.abs().sum(0).max()
        assert 0 < (found[1] - exact[1]).abs().max() < least * hidden.abs().sum(0).max()


def test_filter_never_drops_a_target() -> None:
    """However high the bound below 1, what pulls a target up stays, where the target is not yet learnt."""
    hidden, weight, targets = case(6)
    cut = LogitCut(filter_eps=0.5, tile=(1, 1))
    (found,) = torch.autograd.grad(losses_of(hidden * 0, weight, targets, cut).sum(), hidden, retain_graph=True)
    assert torch.equal(found, torch.zeros_like(found))
    (found,) = torch.autograd.grad(losses_of(hidden, weight * 0.01, targets, cut).sum(), weight)
    assert found.abs().sum() > 0


def test_ignored_tokens_have_no_gradient() -> None:
    """An ignored token's loss has no gradient, even where the incoming one is infinite."""
    hidden, weight, targets = case(6)
    grad = torch.ones(6).masked_fill(targets == -100, float("inf"))
    (found,) = torch.autograd.grad(losses_of(hidden, weight, targets), hidden, grad)
    assert found.isfinite().all()
    assert (found[targets == -100] == 0).all()


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_only_what_is_wanted(wanted: str) -> None:
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
    inputs[wanted].requires_grad_()
    (found,) = torch.autograd.grad(losses_of(inputs["hidden"], inputs["weight"], targets).sum(), inputs[wanted])
    torch.testing.assert_close(found, both[wanted])


def test_weight_gradient_can_be_deferred() -> None:
    """A deferred gradient of the weight has the bits of an immediate one; that of hidden states comes at once."""
    hidden, weight, targets = case(7)
    expected = torch.autograd.grad(losses_of(hidden, weight, targets).sum(), (hidden, weight))
    deferral = Deferral()
    with deferral:
        losses = losses_of(hidden, weight, targets)
    with deferral.defer():
        found = torch.autograd.grad(losses.sum(), (hidden, weight), allow_unused=True)
    assert found[1] is None
    (later,) = deferral.take()
    torch.testing.assert_close((found[0], later.compute()), expected)


@pytest.mark.parametrize("cut", CUTS, ids=range(3))
@pytest.mark.parametrize("deferred", [False, True])
def test_gradients_of_both_results(cut: LogitCut, deferred: bool) -> None:
    """With factors on losses and on lse, gradients are those of autograd by the definition, deferred or not."""
    hidden, weight, targets = case(2, 5, dtype=torch.float64)
    of_losses, of_lse = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    exact = at_once(hidden, weight, targets), (hidden @ weight.T).logsumexp(-1)
    expected = torch.autograd.grad(exact, (hidden, weight), (of_losses, of_lse))
    deferral = Deferral()
    with deferral:
        found = cut_cross_entropy_eager(hidden, weight, targets, cut)
    torch.testing.assert_close(found, exact)
    if not deferred:
        grads = torch.autograd.grad(found, (hidden, weight), (of_losses, of_lse))
        torch.testing.assert_close(grads, expected)
        return
    with deferral.defer():
        grads = torch.autograd.grad(found, (hidden, weight), (of_losses, of_lse), allow_unused=True)
    assert grads[1] is None
    torch.testing.assert_close((grads[0], deferral.take()[0].compute()), expected)


def test_filter_keeps_what_lse_pulls_down() -> None:
    """A target of probability 1 has no gradient of its loss, yet its lse has one, which no filter drops."""
    hidden, weight = torch.eye(1, 4).mul(50).requires_grad_(), torch.eye(9, 4).requires_grad_()
    cut = LogitCut(filter_eps=0.5, tile=(1, 1))
    _, lse = cut_cross_entropy_eager(hidden, weight, torch.tensor([0]), cut)
    (found,) = torch.autograd.grad(lse.sum(), weight)
    torch.testing.assert_close(
        found, torch.zeros(9, 4).index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(50.0))
    )
