"""Losses for answer pairs, compared with TRL's definitions."""

import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.components.loss.cpo import Cpo
from drawloom.components.loss.dpo import Dpo
from drawloom.components.loss.ipo import Ipo
from drawloom.components.loss.orpo import Orpo
from drawloom.components.loss.pairwise import PairwiseLoss, ReferencedLoss
from drawloom.components.loss.simpo import SimPo
from drawloom.components.ports.data import IGNORE_INDEX, TokenBatch
from drawloom.components.ports.model import Head
from drawloom.graph import UserError
from drawloom.kernels.results import TokenLosses
from support.losses import sample

BETA = 0.3


def packed(weights: Tensor, lengths: tuple[tuple[int, ...], ...]) -> TokenBatch:
    """Return rows with documents of these lengths, and padding; `weights` (rows, length) where there is a target."""
    batch = sample().batch
    documents, targets = torch.empty_like(batch.tokens), batch.targets.clone()
    for row, parts in enumerate(lengths):
        rest = documents.shape[1] - sum(parts)
        counts = torch.tensor([*parts, rest])
        documents[row] = torch.repeat_interleave(torch.arange(len(counts)), counts)
        if rest:
            targets[row, -rest:] = IGNORE_INDEX
    weights = weights.masked_fill(targets == IGNORE_INDEX, 0)
    return batch.evolve(targets=targets, document_ids=documents, weights=weights)


@attrs.frozen
class Answers:
    """Log-probabilities of both answers in some pairs, the chosen ones first, padded: float64 (2, pairs, length)."""

    logps: Tensor
    reference: Tensor
    mask: Tensor
    chosen_documents: Tensor
    """Losses of the tokens of each chosen document with its prompt, NaN elsewhere: float64 (pairs, length)."""

    @property
    def sums(self) -> Tensor:
        return (self.logps * self.mask).sum(-1)

    @property
    def means(self) -> Tensor:
        return self.sums / self.mask.sum(-1)

    @property
    def chosen_nll(self) -> Tensor:
        return -self.means[0]


def answers_of(log_probs: Tensor, batch: TokenBatch, pairs: list[tuple[int, int]]) -> Answers:
    """Pick the pairs, (row, pair in the row), from log-probabilities (rows, length, vocabulary)."""
    assert batch.reference is not None
    rows = torch.tensor([row for row, _ in pairs])
    documents = torch.tensor([[2 * pair + side for _, pair in pairs] for side in (0, 1)])
    logps = log_probs.gather(-1, batch.targets.clamp_min(0)[..., None])[..., 0][rows]
    in_document = batch.document_ids[rows] == documents[..., None]
    mask = in_document & (batch.weights[rows] > 0)
    whole = in_document[0] & (batch.targets[rows] != IGNORE_INDEX)
    chosen = torch.where(whole, -logps, math.nan)
    return Answers(torch.stack([logps, logps]), batch.reference.double()[rows].expand(2, -1, -1), mask, chosen)


def dpo_by_trl(answers: Answers) -> Tensor:
    """Return trl 1.16's `sigmoid` loss, `DPOTrainer._compute_loss`, for each pair."""
    chosen, rejected = answers.sums - (answers.reference * answers.mask).sum(-1)
    return -F.logsigmoid(BETA * (chosen - rejected))


def ipo_by_trl(answers: Answers) -> Tensor:
    """Return the `ipo` loss of trl 1.16, `DPOTrainer._compute_loss`."""
    chosen, rejected = ((answers.logps - answers.reference) * answers.mask).sum(-1) / answers.mask.sum(-1)
    result: Tensor = (chosen - rejected - 1 / (2 * BETA)) ** 2
    return result


def cpo_by_trl(answers: Answers) -> Tensor:
    """Return trl 1.16's `sigmoid` loss, `CPOTrainer.cpo_loss`, with the loss of each chosen answer."""
    chosen, rejected = answers.sums
    return -F.logsigmoid(BETA * (chosen - rejected)) + 0.7 * answers.chosen_nll


def simpo_by_trl(answers: Answers) -> Tensor:
    """Return the `simpo` loss of trl 1.16, `CPOTrainer.cpo_loss`."""
    chosen, rejected = answers.means
    return -F.logsigmoid(BETA * (chosen - rejected - 0.2 / BETA))


def orpo_by_trl(answers: Answers) -> Tensor:
    """Return trl 1.16's loss, `ORPOTrainer.odds_ratio_loss`, with the loss of each chosen document and its prompt."""
    chosen, rejected = answers.means.exp()
    odds = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
    return answers.chosen_documents.nanmean(-1) - BETA * F.logsigmoid(odds.log())


def orpo_of_answers(answers: Answers) -> Tensor:
    return orpo_by_trl(answers) - answers.chosen_documents.nanmean(-1) + answers.chosen_nll


@pytest.mark.parametrize(
    ("loss", "by_trl"),
    [
        (Dpo(beta=BETA), dpo_by_trl),
        (Ipo(beta=BETA), ipo_by_trl),
        (Cpo(beta=BETA, alpha=0.7), cpo_by_trl),
        (SimPo(beta=BETA, gamma=0.2), simpo_by_trl),
        (Orpo(beta=BETA), orpo_by_trl),
        (Orpo(beta=BETA, nll="answer"), orpo_of_answers),
    ],
    ids=["dpo", "ipo", "cpo", "simpo", "orpo", "orpo of answers"],
)
def test_loss_and_gradients_equal_trl(loss: PairwiseLoss, by_trl: Callable[[Answers], Tensor]) -> None:
    """The mean over packed pairs with prompts and padding, and every gradient, equal TRL's formulas in float64."""
    case = sample()
    ones = torch.ones(3, 5)
    ones[0, 0] = 0  # a prompt
    batch = packed(ones, ((2, 3), (1, 1, 2, 1), (2, 2)))
    pairs = [(0, 0), (1, 1), (2, 0)]  # the first pair in row 1 has weight 0
    batch = batch.evolve(weights=batch.weights * (batch.document_ids >= torch.tensor([0, 2, 0])[:, None]))
    counts = torch.tensor([int((batch.weights[row] > 0).sum()) for row, _ in pairs])
    batch = batch.evolve(weights=batch.weights / counts[:, None])
    reference = torch.randn(3, 5, generator=torch.Generator().manual_seed(5)).masked_fill(batch.weights == 0, 0)
    batch = batch.evolve(reference=reference)
    total, weight, sums = loss.loss(case.hidden, case.head(), batch)
    answers = answers_of(case.logits().log_softmax(-1), batch, pairs)
    expected = by_trl(answers).mean()
    torch.testing.assert_close(total / weight, expected, rtol=1e-6, atol=0)
    assert float(weight) == pytest.approx(3, rel=1e-6)
    inputs = case.hidden, case.weight
    actual_gradients, expected_gradients = (torch.autograd.grad(value, inputs) for value in (total / weight, expected))
    torch.testing.assert_close(actual_gradients, expected_gradients, rtol=1e-6, atol=1e-8)
    difference = (answers.logps - answers.reference * isinstance(loss, ReferencedLoss)) * answers.mask
    chosen, rejected = BETA * difference.sum(-1) / (answers.mask.sum(-1) if loss.length_normalized else 1)
    margins = (chosen - rejected).detach()
    torch.testing.assert_close(sums["reward_margin"], margins.sum(), rtol=1e-5, atol=1e-6)
    assert float(sums["reward_accuracy"]) == pytest.approx(float((margins > 0).sum()), rel=1e-6)
    torch.testing.assert_close(sums["reward_chosen"] - sums["reward_rejected"], sums["reward_margin"])


def test_orpo_of_certain_answers_is_finite() -> None:
    """An answer of probability 1, whose odds are infinite, gives a finite loss and finite gradients."""
    certain = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    documents = torch.tensor([[0, 0, 1, 1]])
    filled: Any = {"tokens": documents, "targets": documents, "positions": documents, "document_ids": documents}
    head: Head = OneLoss(certain)  # type: ignore[assignment]
    total, _, _ = Orpo().loss(torch.empty(1, 4, 1), head, TokenBatch(**filled, weights=torch.full((1, 4), 0.25)))
    total.backward()  # type: ignore[no-untyped-call]
    assert certain.grad is not None and total.isfinite() and certain.grad.isfinite().all()


class OneLoss:
    """A head in bfloat16 whose tokens have these losses."""

    def __init__(self, losses: Tensor) -> None:
        self.losses = losses

    def token_losses(self, hidden: Tensor, targets: Tensor, weights: Tensor | None = None) -> TokenLosses:
        return TokenLosses(self.losses, self.losses)


def test_long_answers_are_summed_without_rounding() -> None:
    """A sum over 8,192 float32 log-probabilities equals the float64 sum, to the last bit of a float32."""
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(1, 16384, generator=generator) * 8
    documents = (torch.arange(16384) >= 8192).long()[None]
    filled: Any = {"tokens": documents, "targets": documents, "positions": documents, "document_ids": documents}
    batch = TokenBatch(**filled, weights=torch.full((1, 16384), 1 / 16384), reference=torch.zeros(1, 16384))
    head: Head = OneLoss(losses)  # type: ignore[assignment]
    _, _, sums = Dpo(beta=1.0).loss(torch.empty(1, 16384, 1, dtype=torch.bfloat16), head, batch)
    exact = math.fsum(losses[0, 8192:].tolist()) - math.fsum(losses[0, :8192].tolist())
    assert float(sums["reward_margin"]) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tie_counts_a_half_in_spite_of_rounding(dtype: torch.dtype) -> None:
    """Pairs whose rewards differ by rounding count a half each, pairs with a larger difference 1 or 0."""
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(1, 4096, generator=generator) * 8
    documents = (torch.arange(4096) // 128)[None]  # 16 pairs
    filled: Any = {"tokens": documents, "targets": documents, "positions": documents, "document_ids": documents}
    reference = -losses.double()
    for differences, accuracy in (((0.0,) * 4, 8.0), ((0.0, 0.0, 4.0, -4.0), 8.0), ((4.0, 4.0, 0.0, -4.0), 10.0)):
        rounded = losses * (1 + torch.randn(1, 4096, generator=generator) * torch.finfo(dtype).eps / 4)
        rounded[0, :: 2 * 128] -= torch.tensor(differences).repeat(4)
        batch = TokenBatch(**filled, weights=torch.full((1, 4096), 1 / 256), reference=reference)
        head: Head = OneLoss(rounded)  # type: ignore[assignment]
        _, weight, sums = Dpo(beta=BETA).loss(torch.empty(1, 4096, 1, dtype=dtype), head, batch)
        assert float(weight) == 16 and float(sums["reward_accuracy"]) == accuracy


def test_a_batch_without_a_reference_is_refused() -> None:
    """Compared with nothing, the loss would be another one."""
    case = sample()
    with pytest.raises(UserError, match="not every line has ref_chosen_logps"):
        Dpo().loss(case.hidden, case.head(), case.batch)
