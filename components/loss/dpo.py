"""
Direct Preference Optimization: make the chosen answer likelier than the rejected one, relative to a reference model.

Rafailov et al. 2023, "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", arXiv
2305.18290, equation 7. The reward of an answer is beta times the difference of its log-probabilities under the model
and under the reference.
"""

import torch.nn.functional as F
from torch import Tensor

from drawloom import component
from drawloom.components.loss.pairwise import PairScores, ReferencedLoss


@component
class Dpo(ReferencedLoss):
    """
    DPO: -log(sigmoid(margin)) of every pair of answers, where the margin is the difference of their rewards.

    All margins are ties at the first step.
    """

    def pair_losses(self, scores: PairScores) -> Tensor:
        return F.softplus(-scores.margin)  # softplus(-x) is -log(sigmoid(x))
