"""In-memory token documents."""

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TypeVar

import attrs
import numpy as np
import torch
from torch import Tensor

from drawloom.components.data.store.store import choose_id_dtype
from drawloom.ports import Corpus, DocumentPart, Split, Tokenizer, complete_document

WARN_SECONDS = 60.0
"""Seconds between warnings."""

T = TypeVar("T")

log = logging.getLogger("drawloom.data")


def warn_while_reading(items: Iterable[T], name: str) -> Iterator[T]:
    """Yield all items, and warn every minute that the run waits for their end; `name` is who yields them."""
    start = last = time.monotonic()
    for count, item in enumerate(items, 1):
        yield item
        if (now := time.monotonic()) - last >= WARN_SECONDS:
            last = now
            log.warning(
                "%s has yielded %d items in %d seconds, and the run begins after the last one; for data without "
                "an end, write a component with `next_step` for [data]: docs/data.md, Generated and streamed data",
                *(name, count, now - start),
            )


@attrs.frozen(eq=False)
class TokenArrays:
    """
    Concatenated token documents.

    ids: (tokens,), uint16 or uint32; ends: (documents,), int64, document ends; own_weights: (tokens,), float32, or
    None; references: (documents,), float64, log-probabilities of a document's trained tokens under another model, or
    None; labels: (documents,), float64, numbers for the loss, or None. The arrays are tensors because torch shares
    tensors with other processes without a copy.
    """

    ids: Tensor
    ends: Tensor
    own_weights: Tensor | None = None
    references: Tensor | None = None
    labels: Tensor | None = None
    name: str = "document"

    @classmethod
    def concatenate(
        cls,
        documents: Iterable[np.ndarray],
        dtype: type[np.generic],
        weights: Sequence[np.ndarray] | None = None,
        references: Sequence[float] | None = None,
        labels: Sequence[float] | None = None,
        name: str = "document",
    ) -> "TokenArrays":
        """
        Concatenate documents, integers (tokens,) including the end token, and their weights, float32 (tokens,).

        `references` and `labels` have one number per document; `name` is for messages.
        """
        arrays = [document.astype(dtype) for document in documents]
        ends = np.cumsum([len(document) for document in arrays], dtype=np.int64)
        joined_weights = (
            None if weights is None else torch.from_numpy(np.concatenate([np.empty(0, np.float32), *weights]))
        )
        ids = torch.from_numpy(np.concatenate([np.empty(0, dtype), *arrays]))
        numbers = [
            None if values is None else torch.tensor(values, dtype=torch.float64) for values in (references, labels)
        ]
        return cls(ids, torch.from_numpy(ends), joined_weights, numbers[0], numbers[1], name)

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends.numpy(), prepend=0)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all arrays."""
        digest = hashlib.sha256()
        arrays = (self.ids, self.ends, self.own_weights, self.references, self.labels)
        for number, tensor in enumerate(arrays):
            if tensor is not None:
                digest.update(f"{number} {tensor.dtype} {len(tensor)}\n".encode())
                digest.update(tensor.numpy().data)
        return digest.hexdigest()

    def read(self, document: int, first: int, end: int) -> DocumentPart:
        """Return views into a document's ids and weights, up to its end if `end` is beyond the end."""
        ends = self.ends.numpy()
        begin, document_end = int(ends[document - 1]) if document else 0, int(ends[document])
        part = slice(begin + first, min(begin + end, document_end))
        weights = None if self.own_weights is None else self.own_weights.numpy()[part]
        reference = None if self.references is None else float(self.references[document])
        label = None if self.labels is None else float(self.labels[document])
        return DocumentPart(self.ids.numpy()[part], weights, reference, label)

    def describe_origin(self, document: int) -> str:
        """Return the document's name and number."""
        return f"{self.name} {document}"


def tokenize_split(corpus: Corpus, tokenizer: Tokenizer, split: Split) -> TokenArrays:
    """Tokenize a split's documents; empty documents are dropped."""
    texts = warn_while_reading(corpus.documents(split), f"{type(corpus).__name__}.documents({split!r})")
    encoded = (tokenizer.encode(text) for text in texts)
    documents = (complete_document(tokenizer, ids) for ids in encoded if len(ids))
    return TokenArrays.concatenate(documents, choose_id_dtype(tokenizer.vocab_size), name=f"{split} document")
