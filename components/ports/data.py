"""Ports of training data: packed rows and batches."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import attrs
from torch import Tensor

from drawloom.components.ports.corpus import Split
from drawloom.graph import port

IGNORE_INDEX = -100
"""The target of a token without a loss, as in torch's cross_entropy."""


@attrs.frozen
class Batch:
    """
    One microbatch of packed documents; every tensor has shape (rows, length), and is int64 unless it says otherwise.

    `targets` is the token after each, IGNORE_INDEX where there is none to learn. `positions` counts from 0 in each
    document. `document_ids` numbers the documents of a row: attention stays inside equal numbers. `weights`, float32 of
    0 and more, is the weight of each token's loss, 0 where there is no target. A data set makes it from whole rows, so
    that it does not depend on how a batch is cut into microbatches, or a row into parts.

    Rows of pairs have the preferred document of each pair at an even number in `document_ids`, the other one at the
    next; the weights of a pair's tokens add up to that of the pair. `reference`, float32, is for a loss that compares
    the model with another: the other's log-probabilities of the targets, of which the sum over a document counts.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    document_ids: Tensor
    weights: Tensor
    reference: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that there are, in order."""
        return tuple(tensor for tensor in attrs.astuple(self, recurse=False) if tensor is not None)


@port
class PackedDataset(Protocol):
    """
    Rows of fixed length, with random access.

    A class of which the rows are pairs of documents has an attribute `pairs = True`, and so has a loss that compares
    them: without one another, `check` refuses them.
    """

    @property
    def length(self) -> int:
        """Tokens in a row."""
        ...

    def count(self, split: Split) -> int:
        """The number of rows of a split."""
        ...

    def fill_rate(self, split: Split) -> float:
        """The fraction of a split's rows that is tokens of documents, and no padding; 1 if there are no rows."""
        ...

    def batch(self, split: Split, indices: Sequence[int]) -> Batch:
        """The rows at these indices."""
        ...


def has_pairs(component: type) -> bool:
    """Whether a component's documents are pairs, its rows hold pairs together, or its loss compares them."""
    return bool(getattr(component, "pairs", False))


@port
class TrainingData(Protocol):
    """This rank's microbatches, step after step."""

    def next_step(self) -> list[Batch]:
        """This data-parallel rank's microbatches of the next step."""
        ...


@port
class ValidationData(Protocol):
    """A fixed set of validation rows, always in the same order."""

    def batches(self) -> Iterator[Batch]:
        """This data-parallel rank's microbatches."""
        ...
