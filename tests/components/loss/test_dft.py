"""Dynamic Fine-Tuning against its definition."""

import pytest
import torch
from torch import Tensor

from drawloom.components.loss.dft import Dft
from drawloom.components.ports.data import IGNORE_INDEX
from support.kernels import DEVICE
from support.losses import Sample, sample


def by_definition(case: Sample) -> Tensor:
    """Sum -sg(p) * log(p) over targets, like TRL's `loss_type="dft"`, times the token weights."""
    log_probs = case.logits().log_softmax(-1)
    targets = case.batch.targets.where(case.batch.targets != IGNORE_INDEX, 0)
    picked = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (-picked.exp().detach() * picked * case.batch.weights).sum()


@pytest.mark.parametrize("kernel", ["eager", "triton", "cut"])
def test_loss_and_gradients_equal_the_definition(kernel: str) -> None:
    """A token's cross entropy is multiplied by its target's probability, without a gradient through the probability."""
    dtype = torch.float64 if kernel == "eager" else torch.float32
    case = sample(dtype, DEVICE)
    total, weight, sums = Dft().loss(case.hidden, case.head(DEVICE, linear_cross_entropy=kernel), case.batch)
    expected = by_definition(case)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(weight, case.batch.weights.double().sum())
    log_probs = case.logits().log_softmax(-1).detach()
    learned = case.batch.targets != IGNORE_INDEX
    plain = -log_probs[learned].gather(-1, case.batch.targets[learned].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(sums["cross_entropy"], (plain * case.batch.weights[learned]).sum())
    inputs = case.hidden, case.weight
    torch.testing.assert_close(torch.autograd.grad(total, inputs), torch.autograd.grad(expected, inputs))
