"""Choices of experts as a table of tokens by experts, for those who dispatch by such tables."""

import torch
from torch import Tensor


def indices_to_multihot_eager(experts_of: Tensor, probabilities: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """
    Which experts each token has chosen, and with what probability: bool and (tokens, experts).

    experts_of (tokens, choices) of integers from 0 to experts - 1, or -1 for nobody; probabilities (tokens, choices),
    of which those of an expert that a token chooses twice add up.
    """
    known = experts_of >= 0
    place = experts_of.where(known, 0).to(torch.int64)
    shape = len(experts_of), experts
    chosen = torch.zeros(shape, dtype=torch.int32, device=place.device).scatter_add_(1, place, known.to(torch.int32))
    spread = probabilities.new_zeros(shape).scatter_add(1, place, probabilities.where(known, 0))
    return chosen > 0, spread
