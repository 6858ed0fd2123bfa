"""
muP and CompleteP.

Yang et al. 2022, "Tensor Programs V" (arXiv 2203.03466), table 8 in the form of section B.1, which scales the head's
output instead of its weight; Dey et al. 2025, "Don't be lazy: CompleteP enables compute-efficient deep transformers"
(arXiv 2505.01618), table 1 with alpha = 1, which adds the factors of depth, weight decay and epsilon.
"""

import math

from drawloom.ports import ModelScaling, Scaling


def compute_model_scaling(width_ratio: float, depth_ratio: float = 1.0) -> ModelScaling:
    """
    Return the factors for a model `width_ratio` times as wide and `depth_ratio` times as deep as its base.

    An initial standard deviation of residual outputs divided by sqrt(2 * layers), as in GPT-2, becomes the base
    model's, because `residual_multiplier` scales these outputs already.
    """
    inner_eps = 1 / (width_ratio * depth_ratio)
    std = 1 / math.sqrt(width_ratio)
    outer, vector = Scaling(eps=1 / width_ratio), Scaling(eps=inner_eps)
    return ModelScaling(
        outer=outer,
        head=outer,
        matrix=Scaling(std, 1 / width_ratio, inner_eps, width_ratio),
        residual=Scaling(std * math.sqrt(depth_ratio), 1 / width_ratio, inner_eps, width_ratio),
        vector=vector,
        residual_vector=vector,
        residual_multiplier=1 / depth_ratio,
        logit_multiplier=1 / width_ratio,
    )
