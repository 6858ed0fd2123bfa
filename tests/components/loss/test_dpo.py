"""DPO against TRL's definition."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.components.loss.dpo import Dpo
from drawloom.components.ports.data import IGNORE_INDEX, TokenBatch
from drawloom.components.ports.model import Head
from drawloom.graph import UserError
from support.losses import sample

BETA = 0.3


def pack_documents(weights: Tensor, lengths: tuple[tuple[int, ...], ...]) -> TokenBatch:
    """Rows of documents of these lengths, and padding; `weights` (rows, length) where there is a target."""
    batch = sample().batch
    documents, targets = torch.empty_like(batch.tokens), batch.targets.clone()
    for row, document_lengths in enumerate(lengths):
        rest = documents.shape[1] - sum(document_lengths)
        counts = torch.tensor([*document_lengths, rest])
        documents[row] = torch.repeat_interleave(torch.arange(len(counts)), counts)
        if rest:
            targets[row, -rest:] = IGNORE_INDEX
    weights = weights.masked_fill(targets == IGNORE_INDEX, 0)
    return batch.evolve(targets=targets, document_ids=documents, weights=weights)


def by_trl(log_probs: Tensor, reference: Tensor, batch: TokenBatch, pairs: list[tuple[int, int]]) -> Tensor:
    """
    Compute the `sigmoid` loss in trl 1.16, `DPOTrainer._compute_loss`, for these pairs as (row, number in it): float64
    (pairs,). It sums a completion's log-probabilities, and takes the difference to the reference's, all chosen answers
    before all rejected ones.
    """
    kept = [(row, 2 * pair + side) for side in (0, 1) for row, pair in pairs]
    masks = torch.stack([(batch.document_ids == document) & (batch.weights > 0) for _, document in kept])
    rows = torch.tensor([row for row, _ in kept])
    picked = log_probs.gather(-1, batch.targets.clamp_min(0)[..., None])[..., 0]
    logps, ref_logps = (
        (log_probabilities[rows, :] * masks[range(len(rows)), rows]).sum(1) for log_probabilities in (picked, reference)
    )
    chosen_logratios, rejected_logratios = (logps - ref_logps).chunk(2)
    return -F.logsigmoid(BETA * (chosen_logratios - rejected_logratios))


def test_loss_and_gradients_are_those_of_trl() -> None:
    """Pairs that are packed into rows, with prompts and padding: the mean over pairs, and every gradient."""
    case = sample()
    ones = torch.ones(3, 5)
    ones[0, 0] = 0  # a prompt
    batch = pack_documents(ones, ((2, 3), (1, 1, 1, 2), (2, 2)))
    pairs = [(0, 0), (1, 1), (2, 0)]  # of the first pair in row 1 the rejected answer has no target
    batch = batch.evolve(weights=batch.weights * (batch.document_ids >= torch.tensor([0, 2, 0])[:, None]))
    counts = torch.tensor([int((batch.weights[row] > 0).sum()) for row, _ in pairs])
    batch = batch.evolve(weights=batch.weights / counts[:, None])
    reference = torch.randn(3, 5, generator=torch.Generator().manual_seed(5)).masked_fill(batch.weights == 0, 0)
    batch = batch.evolve(reference=reference)
    total, weight, sums = Dpo(beta=BETA).loss(case.hidden, case.head(), batch)
    trl_losses = by_trl(case.logits().log_softmax(-1), reference.double(), batch, pairs)
    torch.testing.assert_close(total / weight, trl_losses.mean(), rtol=1e-6, atol=0)
    assert float(weight) == pytest.approx(3, rel=1e-6)
    inputs = case.hidden, case.weight
    ours, theirs = (torch.autograd.grad(value, inputs) for value in (total / weight, trl_losses.mean()))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    margins = -trl_losses.detach().expm1().log()  # of -log(sigmoid(margin)), the inverse
    torch.testing.assert_close(sums["reward_margin"], margins.sum(), rtol=1e-5, atol=0)
    assert float(sums["reward_accuracy"]) == pytest.approx(float((margins > 0).sum()), rel=1e-6)
    torch.testing.assert_close(sums["reward_chosen"] - sums["reward_rejected"], sums["reward_margin"])


class OneLoss:
    """A head in bfloat16 whose tokens have these losses."""

    def __init__(self, losses: Tensor) -> None:
        self.losses = losses

    def token_losses(self, hidden: Tensor, targets: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.losses, self.losses


def test_long_answers_are_summed_without_rounding() -> None:
    """A sum over 8,192 float32 log-probabilities equals the float64 sum, to the last bit in float32."""
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
def test_a_tie_is_half_however_it_is_rounded(dtype: torch.dtype) -> None:
    """Pairs whose rewards differ by rounding count one half; pairs with a larger difference count 1 or 0."""
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
