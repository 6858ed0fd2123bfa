"""
Contrastive Preference Optimization: DPO without a reference model, with a loss that keeps the chosen answer likely.

Xu et al. 2024, "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine
Translation", arXiv 2401.08417, equation 5.
"""

import torch.nn.functional as F
from torch import Tensor

from drawloom import above, at_least, component, setting
from drawloom.components.loss.pairwise import PairScores, PairwiseLoss


@component
class Cpo(PairwiseLoss):
    """
    CPO: -log(sigmoid(margin)) + alpha * the mean loss of the chosen answer's tokens, of every pair of answers.

    An answer's reward is beta times its log-probability.
    """

    beta: float = setting("factor of the difference of log-probabilities", default=0.1, check=above(0))
    alpha: float = setting(
        "weight of the chosen answer's mean loss per token (behaviour cloning)", default=1.0, check=at_least(0)
    )

    def pair_losses(self, scores: PairScores) -> Tensor:
        return F.softplus(-scores.margin) + self.alpha * scores.chosen_answer_mean_nll
