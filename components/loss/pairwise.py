"""
Base for losses that compare a chosen with a rejected answer.

`data.packing.pairs` makes the rows. Every loss in this family is a function of both answers' rewards, and a reward is
proportional to the answer's log-probability, relative to a reference model if the loss has one.
"""

from typing import ClassVar, Literal

import attrs
import torch
from torch import Tensor

from drawloom import UserError, above, setting
from drawloom.components.loss.decoder_inputs import DecoderInputs, compute_target_logps
from drawloom.graph import component_base_class
from drawloom.ports import IGNORE_INDEX, Head, LossSums, SharedPairs, TokenBatch, TokenContext

TIE_ROUNDINGS = 2
"""
Margin below which a pair is a tie, in rounding errors of the tokens' log-probabilities, taken as independent.

A different order of summation, such as another number of tensor-parallel ranks, changes a margin by 0.4 of this unit.
"""


@attrs.frozen
class PairScores:
    """
    Scores for answer pairs; tensors are float64 (rows, pairs, 2), the chosen answer first.

    `rewards` are differentiable, as are `logps`, the sums over an answer's tokens. `counts` are its token counts, at
    least 1. `chosen_document_mean_nll`, float64 (rows, pairs), is the mean loss over all tokens in the chosen document,
    with its prompt, for a loss with `scores_prompts`.
    """

    rewards: Tensor
    logps: Tensor
    counts: Tensor
    chosen_document_mean_nll: Tensor | None

    @property
    def margin(self) -> Tensor:
        """The chosen answer's reward minus the rejected one's: float64 (rows, pairs)."""
        chosen, rejected = self.rewards.unbind(-1)
        return chosen - rejected

    @property
    def chosen_answer_mean_nll(self) -> Tensor:
        """The mean loss over the chosen answer's tokens: float64 (rows, pairs)."""
        return -(self.logps / self.counts)[..., 0]


class PairInputs(DecoderInputs):
    """Base class for losses of pairs, with or without a shared beginning."""

    def inputs(self, batch: TokenBatch) -> tuple[Tensor, TokenContext]:
        tokens, context = super().inputs(batch)
        return tokens, attrs.evolve(context, document_ids=batch.reader_ids) if isinstance(
            batch, SharedPairs
        ) else context


class ReferenceLogps:
    """Base class for losses whose reference model computes the targets' log-probabilities."""

    def reference_values(self, hidden: Tensor, head: Head, batch: TokenBatch) -> Tensor:
        return compute_target_logps(hidden, head, batch)

    def with_reference(self, batch: TokenBatch, values: Tensor) -> TokenBatch:
        return batch.evolve(reference=values)


@component_base_class
class PairwiseLoss(PairInputs):
    """
    Base for losses over answer pairs: means over the pairs, weighted.

    An answer's log-probability is the float64 sum over its tokens with a weight; a pair's weight is the sum of its
    token weights. Named sums, weighted by pair like the loss, are `reward_margin`, `reward_accuracy` (1 for a margin
    above 0, 0.5 for a tie), `reward_chosen` and `reward_rejected`. A margin within rounding errors is a tie.
    """

    pairs: ClassVar[bool] = True
    length_normalized: ClassVar[bool] = False
    """Whether a reward is proportional to the mean log-probability of an answer's tokens, not to their sum."""
    scores_prompts: ClassVar[bool] = False
    """Whether the loss reads `PairScores.chosen_document_mean_nll`."""

    beta: float

    def pair_losses(self, scores: PairScores) -> Tensor:
        """Return every pair's loss: float64 (rows, pairs), finite for pairs without tokens."""
        raise NotImplementedError

    def loss(self, hidden: Tensor, head: Head, batch: TokenBatch) -> LossSums:
        """Return the sum of losses, the sum of pair weights, and named sums; hidden is (rows, length, hidden_size)."""
        documents, is_answer = batch.document_ids, batch.weights > 0
        if self.scores_prompts:
            every = -head.token_losses(hidden, batch.targets)[0]
            logps, chosen_document_mean_nll = every * is_answer, _compute_chosen_document_mean_nll(every, batch)
        else:
            logps, chosen_document_mean_nll = compute_target_logps(hidden, head, batch), None
        # The difference is of documents, because the data contain sums over documents, not log-probabilities of tokens.
        sums = sum_by_answer(logps, documents)
        counts = sum_by_answer(is_answer, documents).clamp_min(1)
        factor = self.beta / counts if self.length_normalized else self.beta
        rewards = factor * (sums - self._sum_reference_logps_by_answer(batch))
        scores = PairScores(rewards, sums, counts, chosen_document_mean_nll)
        weights = sum_by_answer(batch.weights, documents).sum(-1)
        total = (self.pair_losses(scores) * weights).sum()
        squares = (sum_by_answer(logps.detach().double().square(), documents) * factor**2).sum(-1)
        rounding = TIE_ROUNDINGS * torch.finfo(hidden.dtype).eps * squares.sqrt()
        margin = scores.margin.detach()
        accuracy = torch.where(margin.abs() <= rounding, 0.5, (margin > 0).double())
        chosen, rejected = rewards.detach().unbind(-1)
        values = {"margin": margin, "accuracy": accuracy, "chosen": chosen, "rejected": rejected}
        return total, weights.sum(), {f"reward_{name}": (value * weights).sum() for name, value in values.items()}

    def _sum_reference_logps_by_answer(self, batch: TokenBatch) -> Tensor | float:
        """Sum the reference's log-probabilities by answer: float64 (rows, pairs, 2); 0 for losses without one."""
        return 0.0


@component_base_class
class ReferencedLoss(ReferenceLogps, PairwiseLoss):
    """
    Base for losses with rewards relative to a reference model.

    The reference is the model without its adapters, a frozen model, or the data contain its log-probabilities.
    """

    reference: Literal["adapters", "model", "data"] = setting(
        "reference model: this model without adapters, the recipe's frozen model, or log-probabilities in the data",
        default="adapters",
    )
    beta: float = setting("strength of the pull to the reference model", default=0.1, check=above(0))

    def _sum_reference_logps_by_answer(self, batch: TokenBatch) -> Tensor:
        if batch.reference is None:
            raise UserError(
                'loss.reference = "data", but not every line has ref_chosen_logps and ref_rejected_logps; write them '
                "with `drawloom reference-logps`"
            )
        return sum_by_answer(batch.reference, batch.document_ids)


def sum_by_answer(values: Tensor, documents: Tensor) -> Tensor:
    """
    Sum values (rows, length) over the tokens in every answer: float64 (rows, pairs, 2), 0 for missing answers.

    `documents` are document ids, int (rows, length): pair p has the documents 2 p (chosen) and 2 p + 1 (rejected).
    """
    rows, length = values.shape
    # A row has at most as many documents as tokens; counting the documents would wait for the GPU.
    slots = length + length % 2
    indices = documents + slots * torch.arange(rows, device=documents.device)[:, None]
    sums = torch.zeros(rows * slots, dtype=torch.float64, device=values.device)
    # index_add has a deterministic implementation on GPUs, scatter_add of rows has none.
    return sums.index_add(0, indices.flatten(), values.double().flatten()).view(rows, -1, 2)


def _compute_chosen_document_mean_nll(logps: Tensor, batch: TokenBatch) -> Tensor:
    """Return the mean loss over all targets in chosen documents, float64 (rows, pairs); logps are (rows, length)."""
    counts = sum_by_answer(batch.targets != IGNORE_INDEX, batch.document_ids).clamp_min(1)
    return -(sum_by_answer(logps, batch.document_ids) / counts)[..., 0]
