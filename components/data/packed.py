"""Packed documents: token ids laid end to end and cut into rows."""

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
    A stream of documents as a matrix of rows.

    tokens: (rows * length + 1,), uint16 or int32, the stream of `size` tokens padded with ends; starts: (documents +
    1,), int64, where each document begins and, last, where the padding does. Both are tensors because torch passes
    tensors to other processes through shared memory, without a copy.
    """

    tokens: Tensor
    starts: Tensor
    size: int
    length: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return (len(self.tokens) - 1) // self.length

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """The number of rows, and a SHA-256 of all tokens and document starts."""
        digest = hashlib.sha256(f"{self.tokens.dtype} {self.length} {self.size}\n".encode())
        for tensor in (self.tokens, self.starts):
            digest.update(tensor.numpy().data)
        return {"rows": self.rows, "sha256": digest.hexdigest()}

    def batch(self, rows: Sequence[int]) -> Batch:
        """The rows at these indices; every tensor is (rows, length), int64."""
        starts = self.starts.numpy()
        # one token more than a row has: the target of its last token
        offsets = np.asarray(rows, np.int64).reshape(-1, 1) * self.length + np.arange(self.length + 1)
        tokens = self.tokens.numpy()[offsets].astype(np.int64)
        documents = np.searchsorted(starts, offsets, side="right") - 1
        # a target is in the same document as its token, and not in the padding
        inside = (documents[:, 1:] == documents[:, :-1]) & (offsets[:, 1:] < self.size)
        here, offsets = documents[:, :-1], offsets[:, :-1]
        # positions restart at a document's start, or at the row's, for a document that continues from the row before
        return Batch(
            tokens=torch.from_numpy(tokens[:, :-1].copy()),
            targets=torch.from_numpy(np.where(inside, tokens[:, 1:], IGNORE_INDEX)),
            positions=torch.from_numpy(offsets - np.maximum(starts[here], offsets[:, :1])),
            document_ids=torch.from_numpy(here - here[:, :1]),
            weights=torch.from_numpy(inside.astype(np.float32)),
        )


def pack(documents: Sequence[np.ndarray], end: int, length: int, dtype: type[np.generic]) -> Packed:
    """
    Lay documents (token ids, (tokens,)) end to end, each followed by `end`, and cut them into rows.

    The last row is padded and not dropped, so that every token is used once.
    """
    sizes = np.array([0, *(len(document) + 1 for document in documents)], np.int64)
    starts = np.cumsum(sizes)
    size = int(starts[-1])
    rows = -(-max(size - 1, 0) // length)  # the very last token has no target, and begins no row
    tokens = np.full(rows * length + 1, end, dtype)
    for document, start in zip(documents, starts[:-1], strict=True):
        tokens[start : start + len(document)] = document
    return Packed(torch.from_numpy(tokens), torch.from_numpy(starts), size, length)
