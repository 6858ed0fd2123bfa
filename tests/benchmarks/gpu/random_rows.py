"""Rows with random tokens for whole runs: they read an embedding's rows as text with a large vocabulary does."""

import numpy as np
import torch

from drawloom import component, setting
from drawloom.components.data.token_arrays import TokenArrays
from drawloom.components.ports.corpus import Split

VALIDATION_ROWS = 8


@component
class RandomRows:
    """Documents with random token ids, the same in every process; a document fills a row."""

    vocab_size: int = setting(doc="number of token ids")
    length: int = setting(doc="tokens in a document")
    rows: int = setting(default=512, doc="training documents")

    eos_id = 0

    def documents(self, split: Split) -> TokenArrays:
        """Return a split's documents."""
        count = self.rows if split == "train" else VALIDATION_ROWS
        ids = np.random.default_rng(count).integers(self.vocab_size, size=count * self.length, dtype=np.uint32)
        return TokenArrays(torch.from_numpy(ids), torch.arange(1, count + 1) * self.length)
