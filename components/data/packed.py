"""Documents end to end, cut into rows: what packing makes, and the only part of it that a row needs."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from drawloom.components.ports.data import IGNORE_INDEX, Batch


@attrs.frozen
class Packed:
    """
    A stream of documents as a table of rows.

    `tokens` (rows * length + 1,) is the stream, filled up with ends behind its `size` tokens; `starts` (documents + 1,)
    int64 is where each document begins, and last where the filling does. Both are tensors, for torch hands tensors to
    other processes through shared memory, without a copy.
    """

    tokens: Tensor
    starts: Tensor
    size: int
    length: int

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return (len(self.tokens) - 1) // self.length

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """The number of rows, and a digest of all tokens and of where each document begins."""
        digest = hashlib.sha256(f"{self.tokens.dtype} {self.length} {self.size}\n".encode())
        for tensor in (self.tokens, self.starts):
            digest.update(tensor.numpy().data)
        return {"rows": self.rows, "sha256": digest.hexdigest()}

    def batch(self, rows: Sequence[int]) -> Batch:
        """The rows of these numbers."""
        starts = self.starts.numpy()
        places = np.asarray(rows, np.int64).reshape(-1, 1) * self.length + np.arange(self.length + 1)
        tokens = self.tokens.numpy()[places].astype(np.int64)
        documents = np.searchsorted(starts, places, side="right") - 1
        inside = (documents[:, 1:] == documents[:, :-1]) & (places[:, 1:] < self.size)
        here, places = documents[:, :-1], places[:, :-1]
        return Batch(
            tokens=torch.from_numpy(tokens[:, :-1].copy()),
            targets=torch.from_numpy(np.where(inside, tokens[:, 1:], IGNORE_INDEX)),
            positions=torch.from_numpy(places - np.maximum(starts[here], places[:, :1])),
            document_ids=torch.from_numpy(here - here[:, :1]),
            weights=torch.from_numpy(inside.astype(np.float32)),
        )


def pack(documents: Sequence[np.ndarray], end: int, length: int, dtype: type[np.generic]) -> Packed:
    """
    Lay documents end to end, each followed by the end, and cut them into rows.

    The last row is filled up and not dropped, so that each token is learned or measured once. A row begins only where
    a token with a target is left: the very last token has none.
    """
    sizes = np.array([0, *(len(document) + 1 for document in documents)], np.int64)
    starts = np.cumsum(sizes)
    size = int(starts[-1])
    rows = -(-max(size - 1, 0) // length)
    tokens = np.full(rows * length + 1, end, dtype)
    for document, start in zip(documents, starts[:-1], strict=True):
        tokens[start : start + len(document)] = document
    return Packed(torch.from_numpy(tokens), torch.from_numpy(starts), size, length)
