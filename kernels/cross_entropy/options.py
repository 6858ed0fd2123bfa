"""Options for cross entropy with a vocabulary, perhaps divided among ranks."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class VocabularyGroup(Protocol):
    """Process group collectives for a split vocabulary."""

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor (any shape) over the ranks, in place (all-reduce)."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Stack all ranks' tensors (...) along a new first dimension: (ranks, ...) (all-gather)."""


class SplitVocabulary(Protocol):
    """Rows of the output weight on this rank, from `first` on; the group's ranks together have all rows."""

    @property
    def first(self) -> int:
        """Return this rank's first row index."""

    @property
    def group(self) -> VocabularyGroup:
        """Return the rank group with all rows."""


@dataclass(frozen=True)
class LogitCut:
    """
    Options for how logits are cut into tiles and chunks.

    The gradients skip a tile if every probability in it, less 1 at the target, is below `filter_eps` (0 skips none).
    `tile` is in tokens and words. At most `max_logits` logit gradients exist together. With `part`, the weight has some
    words, and the other ranks in the part's group have the rest.
    """

    ignore_index: int = -100
    filter_eps: float = 0.0
    tile: tuple[int, int] = (128, 256)
    max_logits: int = 2**28
    part: SplitVocabulary | None = None


EXACT = LogitCut()
"""Default options, without a filter."""
