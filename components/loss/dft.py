"""
Dynamic Fine-Tuning: each token's loss times the probability that its target already has.

Wu et al. 2025, "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification",
arXiv 2508.05629, equation 9. Plain fine-tuning weighs a token by the inverse of its probability, seen as a policy
gradient; the factor, through which no gradient flows, takes that out.
"""

from torch import Tensor

from drawloom.components.loss.decoder_inputs import DecoderInputs
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.model import Head
from drawloom.graph import component


@component
class Dft(DecoderInputs):
    """
    Cross entropy of the next token times the target's probability, each token's weighted by the batch.

    The named sum `cross_entropy` is without that factor.
    """

    def loss(self, hidden: Tensor, head: Head, batch: TokenBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The sum of the tokens' losses, of their weights, and named sums; hidden is (rows, length, hidden_size)."""
        losses, _ = head.token_losses(hidden, batch.targets)
        plain = losses.detach()  # a factor without a gradient: the probability is exp(-plain)
        total = (losses * (-plain).exp() * batch.weights).sum()
        return total, batch.weights.double().sum(), {"cross_entropy": (plain * batch.weights).sum()}
