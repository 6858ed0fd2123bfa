"""
SimPO: preferences by the mean log-probability of an answer's tokens, with a target margin and no reference model.

Meng et al. 2024, "SimPO: Simple Preference Optimization with a Reference-Free Reward", arXiv 2405.14734, equation 6.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from drawloom import above, at_least, component, setting
from drawloom.components.loss.pairwise import PairScores, PairwiseLoss


@component
class SimPo(PairwiseLoss):
    """
    SimPO: -log(sigmoid(margin - gamma)) of every pair of answers.

    An answer's reward is beta times its mean log-probability per token. The paper needs a small learning rate, 1e-6.
    """

    length_normalized: ClassVar[bool] = True

    beta: float = setting("factor of the mean log-probability; 2 to 10 in the paper", default=2.0, check=above(0))
    gamma: float = setting("target reward margin; 0.25 to 0.55 times beta in the paper", default=1.0, check=at_least(0))

    def pair_losses(self, scores: PairScores) -> Tensor:
        return F.softplus(self.gamma - scores.margin)
