"""KTO against its formula in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.components.loss.kto import Kto
from drawloom.components.ports.data import TokenBatch
from drawloom.graph import UserError
from support.losses import Sample, sample

GOOD = [True, False, False]


def make_case(drift: float = 0.5) -> tuple[Sample, TokenBatch]:
    """Three rows of an answer with two tokens and a mismatched one with two, behind a prompt token, and labels."""
    case = sample()
    documents = torch.tensor([[0, 0, 0, 1, 1]]).expand(3, -1)
    targets = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(1))
    weights = torch.full((3, 5), 0.25)
    weights[:, 0] = 0
    noise = torch.randn(3, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * drift
    logps = case.logits().log_softmax(-1).gather(-1, targets[..., None])[..., 0].detach()
    reference = (logps + noise).where(weights > 0, 0.0)
    labels = torch.zeros(3, 5)
    labels[:, 0] = torch.where(torch.tensor(GOOD), 1.0, -1.0)
    changes: Any = {"targets": targets, "weights": weights, "document_ids": documents}
    return case, case.batch.evolve(**changes, reference=reference, labels=labels)


def measure_first(loss: Kto, case: Sample, batch: TokenBatch) -> TokenBatch:
    with torch.no_grad():
        return loss.with_step_sums(batch, loss.compute_part_of_step_sums(case.hidden, case.head(), batch))


def by_formula(case: Sample, batch: TokenBatch, beta: float, good: float, bad: float) -> tuple[Tensor, Tensor]:
    """Equation 7 of arXiv 2402.01306, and the divergence, from sums over the tokens of each answer."""
    assert batch.reference is not None
    logps = case.logits().log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
    ratios = logps - batch.reference
    own, other = ratios[:, 1:3].sum(1), ratios[:, 3:].sum(1)
    divergence = other.mean().detach().clamp_min(0)
    signs = torch.where(torch.tensor(GOOD), 1.0, -1.0)
    factors = torch.where(torch.tensor(GOOD), good, bad)
    return (factors * (1 - torch.sigmoid(signs * beta * (own - divergence)))).mean(), divergence


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["divergence above 0", "divergence below 0"])
def test_loss_and_gradients_are_the_formula(sign: float) -> None:
    """The mean over answers, with weights of both kinds; a negative estimate of the divergence counts as 0."""
    case, batch = make_case()
    assert batch.reference is not None
    shift = torch.zeros(3, 5).double()
    shift[:, 3:] = 3 * sign
    batch = batch.evolve(reference=batch.reference - shift)
    loss = Kto(beta=0.3, good_weight=1.5, bad_weight=0.8)
    total, weight, sums = loss.loss(case.hidden, case.head(), measure_first(loss, case, batch))
    expected, divergence = by_formula(case, batch, 0.3, 1.5, 0.8)
    assert (float(divergence) > 1) == (sign > 0) and float(weight) == 3
    torch.testing.assert_close(total / weight, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(sums["kl"] / weight, divergence)
    inputs = case.hidden, case.weight
    ours, theirs = (torch.autograd.grad(value, inputs) for value in (total / weight, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_microbatches_share_the_divergence_of_the_step() -> None:
    """Rows in microbatches of their own have the losses of one batch, once their measured sums are added up."""
    case, batch = make_case()
    loss, slices = Kto(beta=0.5), [slice(row, row + 1) for row in range(3)]
    whole = loss.loss(case.hidden, case.head(), measure_first(loss, case, batch))
    with torch.no_grad():
        sums = sum(
            loss.compute_part_of_step_sums(case.hidden[part], case.head(), batch.take_rows(part)) for part in slices
        )
    assert isinstance(sums, Tensor)
    parts = [
        loss.loss(case.hidden[part], case.head(), loss.with_step_sums(batch.take_rows(part), sums)) for part in slices
    ]
    for index in (0, 1):
        torch.testing.assert_close(sum(part[index] for part in parts), whole[index])
    first = Sample(case.hidden[:1], case.weight, batch)
    alone = loss.loss(first.hidden, case.head(), measure_first(loss, first, batch.take_rows(slices[0])))
    assert abs(float((alone[0] - parts[0][0]).detach())) > 1e-3


def test_without_drift_the_loss_is_a_half() -> None:
    """A policy that is its reference has losses of 1 - sigmoid(0)."""
    case, batch = make_case(drift=0.0)
    loss = Kto()
    total, weight, sums = loss.loss(case.hidden, case.head(), measure_first(loss, case, batch))
    assert float((total / weight).detach()) == pytest.approx(0.5) and float(sums["kl"]) == pytest.approx(0, abs=1e-9)


def test_answers_without_labels_are_refused() -> None:
    """Pairs of a preference corpus have none."""
    case, batch = make_case()
    with pytest.raises(UserError, match="the data have no labels"):
        Kto().loss(case.hidden, case.head(), measure_first(Kto(), case, batch).evolve(labels=None))
