"""Train and validation splits, by document hash."""

import hashlib
from functools import cached_property

import attrs
import numpy as np
import torch
from torch import Tensor

from drawloom.components.ports.corpus import DocumentPart, Split, TokenDocuments


@attrs.frozen(eq=False)
class ChosenDocuments:
    """Document subset; chosen: the document numbers, int64 (documents,), a tensor shared by processes."""

    documents: TokenDocuments
    chosen: Tensor
    name: str

    @cached_property
    def lengths(self) -> np.ndarray:
        lengths: np.ndarray = self.documents.lengths[self.chosen.numpy()]
        return lengths

    @property
    def fingerprint(self) -> str:
        """Digest over all documents and the choice."""
        return hashlib.sha256(f"{self.documents.fingerprint} {self.name}".encode()).hexdigest()

    def read(self, document: int, first: int, end: int) -> DocumentPart:
        return self.documents.read(int(self.chosen[document]), first, end)

    def describe_origin(self, document: int) -> str:
        return self.documents.describe_origin(int(self.chosen[document]))


def select_split_documents(
    documents: TokenDocuments, document_hashes: np.ndarray, split: Split, validation_fraction: float
) -> ChosenDocuments:
    """Select a split's documents by their hashes, uint64 (documents,)."""
    # the highest bits of a hash suffice
    for_validation = document_hashes >> np.uint64(11) < np.uint64(int(validation_fraction * 2**53))
    chosen = np.flatnonzero(for_validation if split == "validation" else ~for_validation)
    return ChosenDocuments(documents, torch.from_numpy(chosen), f"{split} {validation_fraction}")
