"""
Vocabulary-parallel cross entropy: every rank computes with its rows of the output weight; one exchange joins them.
"""

from typing import Protocol

import torch
from torch import Tensor

from drawloom.kernels.logsumexp import logsumexp_in_fixed_order

NOT_HERE = -1
"""Local target of a token whose target is a row of another rank, or is ignored."""


class VocabularyGroup(Protocol):
    """Process group collectives for a split vocabulary."""

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor (any shape) over the ranks, in place (all-reduce)."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """Stack all ranks' tensors (...) along a new first dimension: (ranks, ...) (all-gather)."""
        ...


class SplitVocabulary(Protocol):
    """Rows of the output weight on this rank, from `first` on; the group's ranks together have all rows."""

    @property
    def first(self) -> int:
        """Return this rank's first row index."""
        ...

    @property
    def group(self) -> VocabularyGroup:
        """Return the rank group with all rows."""
        ...


def find_local_target_rows(targets: Tensor, rows: int, ignore_index: int, part: SplitVocabulary | None) -> Tensor:
    """Return the targets' local rows, int64 (tokens,), or -1 if they are on another rank or ignored."""
    is_learned = targets != ignore_index
    if part is None:
        return targets.where(is_learned, NOT_HERE)
    local = targets - part.first
    return local.where(is_learned & (local >= 0) & (local < rows), NOT_HERE)


def combine_lse_and_target_logit_over_ranks(
    lse: Tensor, target_logit: Tensor, part: SplitVocabulary | None
) -> tuple[Tensor, Tensor]:
    """
    Return log-sum-exp and target logit by token over the whole vocabulary.

    All are float32 (tokens,). `lse` and `target_logit` come from this rank's part; a target on another rank has logit
    0.
    """
    if part is None:
        return lse, target_logit
    gathered = part.group.gather(torch.stack((lse, target_logit)))
    # Exactly one part has the target, and the others contribute 0.
    return logsumexp_in_fixed_order(gathered[:, 0].T), gathered[:, 1].sum(0)


def all_reduce_gradient(gradient: Tensor, part: SplitVocabulary | None) -> Tensor:
    """Sum a replicated tensor's gradient (any shape) over all parts, in place."""
    if part is not None:
        part.group.sum(gradient)
    return gradient
