"""Tokens predicted from earlier ones, against plain autograd over all logits."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.components.loss.next_token import NextToken, _mark_targets_among_k_likeliest
from drawloom.components.ports.data import IGNORE_INDEX
from drawloom.components.ports.pipeline import Loss
from drawloom.graph.testing import check_port
from support.kernels import DEVICE
from support.losses import Sample, sample


def by_torch(case: Sample, z_loss: float, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the whole loss, and its z-loss, from all logits at once."""
    logits, batch = case.logits(), case.batch
    options: dict[str, Any] = {"ignore_index": IGNORE_INDEX, "reduction": "none"}
    losses = F.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), label_smoothing=label_smoothing, **options
    ).view_as(batch.targets)
    penalty = (z_loss * logits.logsumexp(-1).square() * batch.weights).sum()
    return (losses * batch.weights).sum() + penalty, penalty


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_loss_and_gradients_equal_torch(z_loss: float, label_smoothing: float) -> None:
    """In float64 the loss is torch's smoothed cross entropy plus z * lse^2, times each token's weight."""
    case = sample()
    loss = NextToken(z_loss=z_loss, label_smoothing=label_smoothing)
    total, weight, sums = loss.loss(case.hidden, case.head(), case.batch)
    expected, penalty = by_torch(case, z_loss, label_smoothing)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(weight, case.batch.weights.double().sum())
    assert sums.keys() == {"cross_entropy", "z_loss"} if z_loss else {"cross_entropy"}
    torch.testing.assert_close(sums["cross_entropy"], by_torch(case, 0.0, 0.0)[0].detach())
    torch.testing.assert_close(sums.get("z_loss", torch.tensor(0.0).double()), penalty.detach())
    inputs = case.hidden, case.weight
    torch.testing.assert_close(torch.autograd.grad(total, inputs), torch.autograd.grad(expected, inputs))


@pytest.mark.parametrize("kernel", ["eager", "triton", "cut"])
def test_every_kernel_gives_the_same_loss_and_gradients(kernel: str) -> None:
    """In float32 the loss and its gradients do not depend on the head's kernel."""
    case = sample(torch.float32, DEVICE)
    loss = NextToken(z_loss=0.3, label_smoothing=0.2)
    total, _, _ = loss.loss(case.hidden, case.head(DEVICE, linear_cross_entropy=kernel), case.batch)
    expected, _ = by_torch(case, 0.3, 0.2)
    torch.testing.assert_close(total, expected)
    inputs = case.hidden, case.weight
    torch.testing.assert_close(torch.autograd.grad(total, inputs), torch.autograd.grad(expected, inputs))


def test_accuracy_counts_the_likeliest_targets() -> None:
    """The metric sums the weights of tokens whose target has the greatest logit, without a gradient."""
    case = sample()
    total, _, sums = NextToken(accuracy=True).loss(case.hidden, case.head(), case.batch)
    correct = case.logits().argmax(-1) == case.batch.targets
    assert correct.any() and not correct.all()
    torch.testing.assert_close(sums["accuracy"], case.batch.weights[correct].sum())
    plain, _, _ = NextToken().loss(case.hidden, case.head(), case.batch)
    assert torch.equal(total, plain) and not sums["accuracy"].requires_grad


@pytest.mark.parametrize("k", [1, 3])
def test_top_k_accuracy_counts_targets_among_the_greatest_logits(k: int) -> None:
    """The metric sums the weights of tokens whose target is in torch.topk of their logits, in any chunks."""
    case = sample()
    _, _, sums = NextToken(top_k=k, accuracy=True).loss(case.hidden, case.head(), case.batch)
    is_hit = (case.logits().topk(k).indices == case.batch.targets.unsqueeze(-1)).any(-1)
    assert is_hit.any() and not is_hit.all()
    torch.testing.assert_close(sums["top_k_accuracy"], case.batch.weights[is_hit].sum())
    assert k > 1 or sums["top_k_accuracy"] == sums["accuracy"]


def test_top_k_accuracy_ranks_equal_logits_by_id() -> None:
    """Two of four equal logits are among the two likeliest: the ones with lower ids, as in argmax."""
    logits, targets = torch.zeros(4, 4, dtype=torch.bfloat16), torch.arange(4)
    assert _mark_targets_among_k_likeliest(logits, targets, k=2).tolist() == [1.0, 1.0, 0.0, 0.0]


def test_it_keeps_the_contract_of_losses_with_all_settings() -> None:
    """Smoothed, with z-loss and accuracy, sums add up over rows and count each token by its weight."""
    check_port(partial(NextToken, z_loss=0.3, label_smoothing=0.2, accuracy=True, top_k=2), Loss)


def test_all_stages_see_the_weights_of_tokens() -> None:
    """The first stage gets token ids, and every stage positions, document ids and weights."""
    batch = sample().batch
    tokens, shared = NextToken().inputs(batch)
    assert tokens is batch.tokens and shared.weights is batch.weights
    assert shared.positions is batch.positions and shared.document_ids is batch.document_ids
