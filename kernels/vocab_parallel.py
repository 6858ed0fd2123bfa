"""A vocabulary split over ranks: each computes with its rows of the output weight, and one exchange joins results."""

from typing import Protocol

import torch
from torch import Tensor

NOT_HERE = -1
"""The local target of a token whose target is another rank's row, or is ignored."""


class VocabularyGroup(Protocol):
    """The collectives that a split vocabulary needs of a process group."""

    def sum(self, tensor: Tensor) -> None:
        """All-reduce a tensor of any shape, in place, to the sum over the ranks."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """All-gather tensors of one shape (...): (ranks, ...)."""
        ...


class SplitVocabulary(Protocol):
    """The rows of the output weight on this rank: those from `first` on; the ranks of the group hold all rows."""

    @property
    def first(self) -> int:
        """The number of this rank's first row."""
        ...

    @property
    def group(self) -> VocabularyGroup:
        """The ranks that hold all rows."""
        ...


def local_targets(targets: Tensor, rows: int, ignore_index: int, part: SplitVocabulary | None) -> Tensor:
    """Which of this rank's rows each target is: int64 (tokens,) both; -1 if it is another rank's, or ignored."""
    learned = targets != ignore_index
    if part is None:
        return targets.where(learned, NOT_HERE)
    local = targets - part.first
    return local.where(learned & (local >= 0) & (local < rows), NOT_HERE)


def all_gather_lse(lse: Tensor, target_logit: Tensor, part: SplitVocabulary | None) -> tuple[Tensor, Tensor]:
    """
    Over the whole vocabulary: the log-sum-exp of the logits by token, and the logit of each token's target.

    Both are float32 (tokens,) in and out; in, they are of this rank's part, the latter 0 where the target is not here.
    """
    if part is None:
        return lse, target_logit
    gathered = part.group.gather(torch.stack((lse, target_logit)))
    # Exactly one part has each target, and the others gave 0.
    return gathered[:, 0].logsumexp(0), gathered[:, 1].sum(0)


def all_reduce(gradient: Tensor, part: SplitVocabulary | None) -> Tensor:
    """Sum over all parts, in place, the gradient of a tensor of any shape that all ranks hold."""
    if part is not None:
        part.group.sum(gradient)
    return gradient
