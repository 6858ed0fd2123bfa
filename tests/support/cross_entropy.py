"""Inputs and an oracle for tests of the cross entropies."""

import torch
from torch import Tensor

from support.kernels import DEVICE


def exact_losses(hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int = -100) -> Tensor:
    """Return the losses by their definition in float64: minus the log of the target's share of exp(logits)."""
    logits = hidden.double() @ weight.double().T
    chosen = logits.gather(-1, targets.where(targets != ignored, 0).unsqueeze(-1)).squeeze(-1)
    return (logits.logsumexp(-1) - chosen).where(targets != ignored, 0)


def random_targets(shape: tuple[int, ...], words: int) -> Tensor:
    """Return random targets of a shape; every fourth target is ignored."""
    targets = torch.randint(words, shape)
    targets.view(-1)[::4] = -100
    return targets.to(DEVICE)
