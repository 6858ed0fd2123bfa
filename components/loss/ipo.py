"""
Identity Preference Optimization: a squared loss that stops once the margin has reached its target.

Azar et al. 2023, "A General Theoretical Paradigm to Understand Learning from Human Preferences", arXiv 2310.12036,
equation 17. Log-probabilities are means over an answer's tokens, as in the authors' experiments; sums would put the
target out of reach for long answers.
"""

from typing import ClassVar

from torch import Tensor

from drawloom import above, component, setting
from drawloom.components.loss.pairwise import PairScores, ReferencedLoss


@component
class Ipo(ReferencedLoss):
    """
    IPO: (margin / beta - 1 / (2 * beta))^2 of every pair of answers.

    An answer's reward is beta times the difference of its mean log-probability per token to the reference's.
    """

    length_normalized: ClassVar[bool] = True

    beta: float = setting(
        "regularization; the margin per token aims at 1 / (2 * beta) nats", default=0.1, check=above(0)
    )

    def pair_losses(self, scores: PairScores) -> Tensor:
        return (scores.margin / self.beta - 1 / (2 * self.beta)).square()
