"""
Dynamic Fine-Tuning: token losses times target probabilities.

Wu et al. 2025, "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification",
arXiv 2508.05629, equation 9. Seen as a policy gradient, plain fine-tuning weights a token by the inverse of its
probability. The factor, which has no gradient, cancels that weight.
"""

from torch import Tensor

from drawloom import component
from drawloom.components.loss.decoder_inputs import DecoderInputs
from drawloom.ports import Head, LossSums, TokenBatch


@component
class Dft(DecoderInputs):
    """
    Cross entropy of the next token times the target's probability, weighted by the batch's token weights.

    The named sum `cross_entropy` omits the factor.
    """

    def loss(self, hidden: Tensor, head: Head, batch: TokenBatch) -> LossSums:
        """Return the loss sum, the token weight sum, and named sums; hidden is (rows, length, hidden_size)."""
        losses, _ = head.token_losses(hidden, batch.targets)
        plain = losses.detach()  # a factor without a gradient: the probability is exp(-plain)
        total = (losses * (-plain).exp() * batch.weights).sum()
        return total, batch.weights.double().sum(), {"cross_entropy": (plain * batch.weights).sum()}
