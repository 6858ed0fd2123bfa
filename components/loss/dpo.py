"""
Direct Preference Optimization: the preferred of two answers is made likelier than the other, against a reference.

Rafailov et al. 2023, "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", arXiv
2305.18290, equation 7. The reward of an answer is beta times the logarithm of how much likelier it is than by the
reference: the model without its adapters, or one whose log-probabilities the data have.
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
Roundings of each log-probability, as independent errors, within which a margin is a tie: one pair of matrix products
summed in another order, as by another number of tensor-parallel ranks, makes 0.4 of a rounding.
"""


@component
class Dpo(DecoderInputs):
    """
    -log(sigmoid(margin)) of each pair of answers, where the margin is the difference of their rewards.

    The rows are those of `data.packing.pairs`. An answer's log-probability is the sum of those of its tokens that have
    a weight, in float64; the weights of a pair add up to what it counts. Named sums, by pair as the loss, are
    `reward_margin`, `reward_accuracy` (1 for a pair whose margin is above 0, a half for a tie), `reward_chosen`,
    `reward_rejected`. A margin that rounding alone could have made is a tie: all are at the first step.
    """

    pairs: ClassVar[bool] = True

    reference: Literal["adapters", "data"] = setting(
        default="adapters", doc="the model without adapters, or one of which the data have ref_chosen_logps"
    )
    beta: float = setting(default=0.1, check=above(0), doc="how close to the reference the model is kept; more: closer")

    def token_logps(self, hidden: Tensor, head: Head, batch: TokenBatch) -> Tensor:
        """The log-probabilities of the targets that have a weight, at least float32 (rows, length), 0 elsewhere."""
        return -head.token_losses(hidden, batch.targets, (batch.weights > 0).float())[0]

    def with_reference(self, batch: TokenBatch, logps: Tensor) -> TokenBatch:
        return batch.evolve(reference=logps)

    def loss(self, hidden: Tensor, head: Head, batch: TokenBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The sum of the pairs' losses, of their weights, and named sums; hidden is (rows, length, hidden_size)."""
        if batch.reference is None:
            raise UserError(
                'loss.reference = "data", but not every line has ref_chosen_logps and ref_rejected_logps; write them '
                "with `drawloom reference-logps`"
            )
        logps = self.token_logps(hidden, head, batch)
        # By document and not by token: the data have sums.
        model, reference = (_by_pair(values, batch.document_ids) for values in (logps, batch.reference))
        rewards = self.beta * (model - reference)
        weights = _by_pair(batch.weights, batch.document_ids).sum(-1)
        chosen, rejected = rewards.unbind(-1)
        margin = chosen - rejected
        total = (F.softplus(-margin) * weights).sum()  # softplus(-x) is -log(sigmoid(x))
        squares = _by_pair(logps.detach().double().square(), batch.document_ids).sum(-1)
        rounding = TIE_ROUNDINGS * torch.finfo(hidden.dtype).eps * self.beta * squares.sqrt()
        accuracy = torch.where(margin.abs() <= rounding, 0.5, (margin > 0).double())
        sums = {"margin": margin, "accuracy": accuracy, "chosen": chosen, "rejected": rejected}
        named = {f"reward_{name}": (each.detach() * weights).sum() for name, each in sums.items()}
        return total, weights.sum(), named


def _by_pair(values: Tensor, documents: Tensor) -> Tensor:
    """Sums over the documents of each row, of (rows, length): float64 (rows, pairs, 2), zeros where there is none."""
    rows, length = values.shape
    # As many documents as tokens fit any row; to count them would wait for a GPU.
    slots = length + length % 2
    places = documents + slots * torch.arange(rows, device=documents.device)[:, None]
    sums = torch.zeros(rows * slots, dtype=torch.float64, device=values.device)
    # index_add is deterministic on GPUs where that is asked for, and scatter_add of rows is not.
    return sums.index_add(0, places.flatten(), values.double().flatten()).view(rows, -1, 2)
