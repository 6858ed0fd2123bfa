"""Vocabulary-parallel cross entropy: each rank computes with its rows of the output weight; one exchange joins them."""

from typing import Protocol

import torch
from torch import Tensor

NOT_HERE = -1
"""Local target of a token whose target is a row of another rank, or is ignored."""


class VocabularyGroup(Protocol):
    """Collectives of a process group that a split vocabulary uses."""

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor of any shape over the ranks, in place (all-reduce)."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors (...) of all ranks as (ranks, ...) (all-gather)."""
        ...


class SplitVocabulary(Protocol):
    """Rows of the output weight on this rank, from `first` on; the ranks of the group have all rows together."""

    @property
    def first(self) -> int:
        """Return the index of this rank's first row."""
        ...

    @property
    def group(self) -> VocabularyGroup:
        """Return the group of ranks that have all rows together."""
        ...


def local_targets(targets: Tensor, rows: int, ignore_index: int, part: SplitVocabulary | None) -> Tensor:
    """Return the local row of each target, int64 (tokens,), or -1 if it is on another rank or ignored."""
    is_learned = targets != ignore_index
    if part is None:
        return targets.where(is_learned, NOT_HERE)
    local = targets - part.first
    return local.where(is_learned & (local >= 0) & (local < rows), NOT_HERE)


def all_gather_lse(lse: Tensor, target_logit: Tensor, part: SplitVocabulary | None) -> tuple[Tensor, Tensor]:
    """
    Return each token's log-sum-exp and the logit of its target over the whole vocabulary.

    All are float32 (tokens,). `lse` and `target_logit` are of this rank's part; a target on another rank has logit 0.
    """
    if part is None:
        return lse, target_logit
    gathered = part.group.gather(torch.stack((lse, target_logit)))
    # Exactly one part has the target, and the others contribute 0.
    return gathered[:, 0].logsumexp(0), gathered[:, 1].sum(0)


def all_reduce(gradient: Tensor, part: SplitVocabulary | None) -> Tensor:
    """Sum the gradient of a replicated tensor of any shape over all parts, in place."""
    if part is not None:
        part.group.sum(gradient)
    return gradient
