"""
Direct Preference Optimization: make the chosen answer likelier than the rejected one, relative to a reference model.

Rafailov et al. 2023, "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", arXiv
2305.18290, equation 7. An answer's reward is beta times the difference between its log-probabilities under the model
and under the reference. The reference is the model without its adapters, or the data contain its log-probabilities.
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.components.loss.decoder_inputs import DecoderInputs
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.model import Head
from drawloom.graph import UserError, above, component, setting

TIE_ROUNDINGS = 2
"""
Margin below which a pair is a tie, in rounding errors of the tokens' log-probabilities, taken as independent.

A different order of summation, such as another number of tensor-parallel ranks, changes a margin by 0.4 of this unit.
"""


@component
class Dpo(DecoderInputs):
    """
    -log(sigmoid(margin)) per answer pair, where the margin is the reward difference.

    `data.packing.pairs` makes the rows. An answer's log-probability is the float64 sum over its tokens with a
    weight; a pair's weight is the sum of its token weights. Named sums, weighted by pair like the loss, are
    `reward_margin`, `reward_accuracy` (1 for a margin above 0, 0.5 for a tie), `reward_chosen` and `reward_rejected`.
    A margin within rounding errors is a tie, as are all margins at the first step.
    """

    pairs: ClassVar[bool] = True

    reference: Literal["adapters", "data"] = setting(
        default="adapters", doc="reference model: this model without adapters, or log-probabilities in the data"
    )
    beta: float = setting(default=0.1, check=above(0), doc="strength of the pull to the reference model")

    def token_logps(self, hidden: Tensor, head: Head, batch: TokenBatch) -> Tensor:
        """Return log-probabilities where targets have a weight, at least float32 (rows, length), 0 elsewhere."""
        return -head.token_losses(hidden, batch.targets, (batch.weights > 0).float())[0]

    def with_reference(self, batch: TokenBatch, logps: Tensor) -> TokenBatch:
        return batch.evolve(reference=logps)

    def loss(self, hidden: Tensor, head: Head, batch: TokenBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss sum, the pair weight sum, and named sums; hidden is (rows, length, hidden_size)."""
        if batch.reference is None:
            raise UserError(
                'loss.reference = "data", but not every line has ref_chosen_logps and ref_rejected_logps; write them '
                "with `drawloom reference-logps`"
            )
        logps = self.token_logps(hidden, head, batch)
        # The difference is of documents, because the data contain sums over documents, not log-probabilities of tokens.
        model, reference = (_sum_by_pair(values, batch.document_ids) for values in (logps, batch.reference))
        rewards = self.beta * (model - reference)
        weights = _sum_by_pair(batch.weights, batch.document_ids).sum(-1)
        chosen, rejected = rewards.unbind(-1)
        margin = chosen - rejected
        total = (F.softplus(-margin) * weights).sum()  # softplus(-x) is -log(sigmoid(x))
        squares = _sum_by_pair(logps.detach().double().square(), batch.document_ids).sum(-1)
        rounding = TIE_ROUNDINGS * torch.finfo(hidden.dtype).eps * self.beta * squares.sqrt()
        accuracy = torch.where(margin.abs() <= rounding, 0.5, (margin > 0).double())
        sums = {"margin": margin, "accuracy": accuracy, "chosen": chosen, "rejected": rejected}
        named = {f"reward_{name}": (values.detach() * weights).sum() for name, values in sums.items()}
        return total, weights.sum(), named


def _sum_by_pair(values: Tensor, documents: Tensor) -> Tensor:
    """Sum values (rows, length) by document: float64 (rows, pairs, 2), zeros for missing documents."""
    rows, length = values.shape
    # A row has at most as many documents as tokens; counting the documents would wait for the GPU.
    slots = length + length % 2
    indices = documents + slots * torch.arange(rows, device=documents.device)[:, None]
    sums = torch.zeros(rows * slots, dtype=torch.float64, device=values.device)
    # index_add has a deterministic implementation on GPUs, scatter_add of rows has none.
    return sums.index_add(0, indices.flatten(), values.double().flatten()).view(rows, -1, 2)
