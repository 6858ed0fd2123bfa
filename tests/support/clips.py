"""Rows without tokens: clips of frames, with leaves of every kind."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from drawloom.components.ports.corpus import Split
from drawloom.components.state.batch import Batch, leaf
from drawloom.graph import component


class Clips(Batch):
    """Rows of frames with a label, and a leaf shared by all rows."""

    frames: dict[str, Tensor] = leaf("tokens")
    labels: Tensor = leaf("rows")
    scale: Tensor = leaf("replicated")
    weights: Tensor = leaf("rows")
    mask: Tensor | None = leaf("tokens", default=None)
    skipped: int = leaf("host", default=0)


def clips(labels: Sequence[int] = range(4), **leaves: Any) -> Clips:
    """Return rows of six frames, which depend on their labels alone."""
    numbers = torch.tensor(labels)
    left = numbers[:, None] * 6 + torch.arange(6)
    frames = {"left": left, "right": torch.stack([left, -left], -1).bfloat16()}
    values = {"frames": frames, "labels": numbers, "scale": torch.tensor(0.5), "weights": torch.ones(len(labels))}
    return Clips(**{**values, "skipped": len(labels), **leaves})


@component
class ClipRows:
    """A hundred clips to train with."""

    batch_type: ClassVar[type[Batch]] = Clips
    length: ClassVar[int] = 6

    def count_rows(self, split: Split) -> int:
        return 100

    def fill_rate(self, split: Split) -> float:
        return 1.0

    def batch(self, split: Split, indices: Sequence[int]) -> Clips:
        return clips(indices)
