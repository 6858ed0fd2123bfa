"""
Odds Ratio Preference Optimization: supervised fine-tuning on chosen answers with a penalty on the rejected ones.

Hong et al. 2024, "ORPO: Monolithic Preference Optimization without Reference Model", arXiv 2403.07691, equations 6
and 7. With m, the mean log-probability of an answer's tokens, log(odds) = m - log(1 - exp(m)).
"""

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom import above, component, setting
from drawloom.components.loss.pairwise import PairScores, PairwiseLoss

MAX_MEAN_LOGP = -1e-6
"""Upper bound of a mean log-probability: at 0 the odds are infinite."""


@component
class Orpo(PairwiseLoss):
    """
    ORPO: mean loss of the chosen tokens - beta * log(sigmoid(log(odds of chosen) - log(odds of rejected))).

    An answer's reward is beta times its mean log-probability per token.
    """

    length_normalized: ClassVar[bool] = True
    scores_prompts: ClassVar[bool] = True

    beta: float = setting("weight of the odds ratio, lambda in the paper", default=0.1, check=above(0))
    nll: Literal["document", "answer"] = setting(
        "tokens of the supervised loss: the chosen answer with its prompt, or without", default="document"
    )

    def pair_losses(self, scores: PairScores) -> Tensor:
        means = (scores.logps / scores.counts).clamp_max(MAX_MEAN_LOGP)
        chosen, rejected = (means - _log1mexp(means)).unbind(-1)
        nll = (
            scores.chosen_answer_mean_nll
            if self.nll == "answer" or scores.chosen_document_mean_nll is None
            else scores.chosen_document_mean_nll
        )
        return nll + self.beta * F.softplus(rejected - chosen)


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for negative x, accurate both near 0 and for very negative x (Maechler 2012)."""
    near = x > -math.log(2)
    # Each branch gets an argument at which its gradient is finite: `where` multiplies the other one's by 0.
    close, far = torch.where(near, x, -1.0), torch.where(near, -1.0, x)
    return torch.where(near, torch.log(-torch.expm1(close)), torch.log1p(-torch.exp(far)))
