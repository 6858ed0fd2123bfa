"""
Kahneman-Tversky Optimization: learn from single good or bad answers, relative to a reference model.

Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv 2402.01306, equation 7. The
reference point z is an estimate of the divergence between the model and the reference: the mean, over all answers of
the step, of the log-ratio for an answer to another prompt. TRL takes this mean over a microbatch on all ranks.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from drawloom import UserError, above, at_least, component, setting
from drawloom.components.loss.decoder_inputs import compute_target_logps
from drawloom.components.loss.pairwise import PairInputs, ReferenceLogps, sum_by_answer
from drawloom.ports import Head, LossSums, TokenBatch


@component
class Kto(ReferenceLogps, PairInputs):
    """
    KTO: 1 - sigmoid(beta * (r - z)) of a good answer, and 1 - sigmoid(beta * (z - r)) of a bad one, times a weight.

    r is the answer's log-probability relative to the reference model. z, at least 0, is measured before the
    step's first backward pass over all its microbatches and ranks: the loss is the same on every mesh. Named sums are
    `signed_reward`, of beta * r for good answers and -beta * r for bad ones, and `kl`, of z.
    """

    pairs: ClassVar[bool] = True
    unpaired: ClassVar[bool] = True

    reference: Literal["adapters", "model"] = setting(
        "reference model: this model without adapters, or the recipe's frozen model", default="adapters"
    )
    beta: float = setting("strength of the pull to the reference model", default=0.1, check=above(0))
    good_weight: float = setting("factor of the loss of good answers", default=1.0, check=at_least(0))
    bad_weight: float = setting(
        "factor of the loss of bad answers; the fraction of good answers over that of bad ones balances both",
        default=1.0,
        check=at_least(0),
    )

    def compute_part_of_step_sums(self, hidden: Tensor, head: Head, batch: TokenBatch) -> Tensor:
        """Return the weighted sum of mismatched answers' log-ratios, and the sum of weights: float64 (2,)."""
        ratios, weights = self._compute_pair_log_ratios(compute_target_logps(hidden, head, batch), batch)
        return torch.stack([(ratios[..., 1] * weights).sum(), weights.sum()])

    def with_step_sums(self, batch: TokenBatch, sums: Tensor) -> TokenBatch:
        return batch.evolve(measured=sums)

    def loss(self, hidden: Tensor, head: Head, batch: TokenBatch) -> LossSums:
        """Return the sum of losses, the sum of weights, and named sums; hidden is (rows, length, hidden_size)."""
        if batch.labels is None or batch.measured is None:
            raise UserError('the data have no labels; write use = "data.feedback" in the corpus', 2)
        ratios, weights = self._compute_pair_log_ratios(compute_target_logps(hidden, head, batch), batch)
        labels = sum_by_answer(batch.labels, batch.document_ids)[..., 0]
        divergence = (batch.measured[0] / batch.measured[1].clamp_min(torch.finfo(torch.float64).tiny)).clamp_min(0)
        is_good = labels > 0
        distances = torch.where(is_good, 1, -1) * self.beta * (ratios[..., 0] - divergence)
        factors = torch.where(is_good, self.good_weight, self.bad_weight) * weights
        rewards = self.beta * ratios[..., 0].detach() * labels
        sums = {"signed_reward": (rewards * weights).sum(), "kl": divergence * weights.sum()}
        return (factors * torch.sigmoid(-distances)).sum(), weights.sum(), sums

    def _compute_pair_log_ratios(self, logps: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """
        Return log-probabilities minus the reference's, float64 (rows, pairs, 2), and weights (rows, pairs).

        The last dimension has the answer and a mismatched one.
        """
        documents, reference = batch.document_ids, batch.reference
        assert reference is not None  # the executor computes it
        weights = sum_by_answer(batch.weights, documents).sum(-1)
        return sum_by_answer(logps, documents) - sum_by_answer(reference, documents), weights
