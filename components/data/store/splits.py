"""The splits of a store, by the hash of each document."""

import hashlib
from functools import cached_property

import attrs
import numpy as np
import torch
from torch import Tensor

from drawloom.components.data.store.store import Store
from drawloom.components.ports.corpus import Split, TokenDocuments


@attrs.frozen(eq=False)
class ChosenDocuments:
    """Some documents of others; chosen: their numbers, int64 (documents,), a tensor that processes share."""

    documents: TokenDocuments
    chosen: Tensor
    name: str

    @cached_property
    def lengths(self) -> np.ndarray:
        """The tokens of each."""
        lengths: np.ndarray = self.documents.lengths[self.chosen.numpy()]
        return lengths

    @property
    def fingerprint(self) -> str:
        """Of all documents, and of the choice."""
        return hashlib.sha256(f"{self.documents.fingerprint} {self.name}".encode()).hexdigest()

    def tokens(self, document: int, first: int, last: int) -> np.ndarray:
        """Ids of the document."""
        return self.documents.tokens(int(self.chosen[document]), first, last)

    def weights(self, document: int, first: int, last: int) -> np.ndarray | None:
        """The weights of these tokens."""
        return self.documents.weights(int(self.chosen[document]), first, last)

    def source(self, document: int) -> str:
        """Where the document comes from."""
        return self.documents.source(int(self.chosen[document]))


def split_documents(store: Store, split: Split, fraction: float) -> TokenDocuments:
    """The documents of a split, by their ids: equal ones are in one split; `fraction` is of the validation split."""
    if fraction == 0 and split == "train":
        return store
    # the highest bits of a hash are as good as the whole
    held_out = store.keys >> np.uint64(11) < np.uint64(int(fraction * 2**53))
    chosen = np.flatnonzero(held_out if split == "validation" else ~held_out)
    return ChosenDocuments(store, torch.from_numpy(chosen), f"{split} {fraction}")
