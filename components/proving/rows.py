"""Generated rows with different counts on different ranks, for `drawloom prove`."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from drawloom import between, component, setting
from drawloom.ports import IGNORE_INDEX, MAX_LENGTH, Batch, Split, TokenBatch, Tokenizer

ROWS: dict[Split, int] = {"train": 64, "validation": 8}
PATTERN = 8
"""Rows after which the kinds of rows repeat."""


@component
class ProvingRows:
    """
    Random tokens in documents of odd lengths, with random weights, for `drawloom prove`.

    Of eight rows, three end with padding, the fourth has targets only in its first quarter, the fifth and the sixth
    have none, and the seventh is one document.
    """

    batch_type: ClassVar[type[Batch]] = TokenBatch

    tokenizer: Tokenizer
    length: int = setting("sequence length: tokens in a row", default=16, check=between(8, MAX_LENGTH + 1))

    def count_rows(self, split: Split) -> int:
        return ROWS[split]

    def fill_rate(self, split: Split) -> float:
        return self.batch(split, range(ROWS[split])).token_count / (ROWS[split] * self.length)

    def batch(self, split: Split, indices: Sequence[int]) -> TokenBatch:
        rows = [self._make_row(split, index) for index in indices]
        return TokenBatch(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]})

    def _make_row(self, split: Split, index: int) -> dict[str, Tensor]:
        """Return a row's leaves (length,), as a function of its number."""
        length, kind = self.length, index % PATTERN
        generator = torch.Generator().manual_seed(2 * index + (split == "validation"))
        tokens = torch.randint(self.tokenizer.vocab_size, (length,), generator=generator)
        weights = torch.rand(length, generator=generator) + 0.5
        filled = length - (kind // 2 * 2 + 1 if kind in (0, 2, 7) else 0)
        documents, positions, targets = (torch.zeros(length, dtype=torch.int64) for _ in range(3))
        start = number = 0
        while start < filled:
            size = length if kind == 6 else (3, 5, 7)[(index + number) % 3]
            end = min(start + size, filled)
            documents[start:end], positions[start:end] = number, torch.arange(end - start)
            targets[start:end] = tokens[start:end].roll(-1)
            targets[end - 1] = IGNORE_INDEX
            start, number = end, number + 1
        documents[filled:], positions[filled:] = number, torch.arange(length - filled)
        padding = torch.arange(length) >= filled
        without_loss = padding.clone()
        without_loss[{3: length // 4, 4: 0, 5: 0}.get(kind, length) :] = True
        targets[without_loss] = IGNORE_INDEX
        weights[targets == IGNORE_INDEX] = 0.0
        return {
            "tokens": tokens,
            "targets": targets,
            "positions": positions,
            "document_ids": documents,
            "weights": weights,
            "padding": padding,
        }
