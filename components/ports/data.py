"""Ports of training data: packed rows and batches."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import attrs
import numpy as np
import torch
from torch import Tensor

from drawloom.components.ports.corpus import Split, TokenCorpus
from drawloom.components.state.batch import Batch, leaf
from drawloom.graph import UserError, port
from drawloom.graph.wiring.node import NodeView

IGNORE_INDEX = -100
"""The target of a token without a loss, as in torch's cross_entropy."""

MAX_LENGTH = 100_000_000
"""The greatest number of tokens of a row: ten times the longest contexts."""


class TokenBatch(Batch):
    """
    One microbatch of packed documents; every tensor has shape (rows, length), and is int64 unless it says otherwise.

    `targets` is the token after each, IGNORE_INDEX where there is none to learn. `positions` counts from 0 in each
    document. `document_ids` numbers the documents of a row: attention stays inside equal numbers. `weights`, float32 of
    0 and more, is the weight of each token's loss, 0 where there is no target.

    Rows of pairs have the preferred document of each pair at an even number in `document_ids`, the other one at the
    next; the weights of a pair's tokens add up to that of the pair. `reference`, float32 or float64, is for a loss that
    compares the model with another: the other's log-probabilities of the targets, which count as a sum by document.

    `padding` is how many positions of all rows are no tokens of documents: they are not counted as tokens.
    """

    tokens: Tensor = leaf("tokens")
    targets: Tensor = leaf("tokens")
    positions: Tensor = leaf("tokens")
    document_ids: Tensor = leaf("tokens")
    weights: Tensor = leaf("tokens")
    reference: Tensor | None = leaf("tokens", default=None)
    padding: int = leaf("host", default=0, kw_only=True)

    @classmethod
    def from_numpy(
        cls,
        *,
        tokens: np.ndarray,
        targets: np.ndarray,
        positions: np.ndarray,
        document_ids: np.ndarray,
        weights: np.ndarray,
        reference: np.ndarray | None = None,
        padding: int = 0,
    ) -> Self:
        """Return the batch of these arrays, (rows, length) each, whose memory it shares."""
        return cls(
            tokens=torch.from_numpy(tokens),
            targets=torch.from_numpy(targets),
            positions=torch.from_numpy(positions),
            document_ids=torch.from_numpy(document_ids),
            weights=torch.from_numpy(weights),
            reference=None if reference is None else torch.from_numpy(reference),
            padding=padding,
        )

    @classmethod
    def outline(cls, rows: int, length: int) -> Self:
        """Return a batch without a reference on the meta device."""
        whole = torch.empty(rows, length, dtype=torch.int64, device="meta")
        return cls(whole, whole, whole, whole, torch.empty_like(whole, dtype=torch.float32))

    def has_whole_rows(self) -> bool:
        """Whether each row is one document, as far as the host knows: False of ids that are on a GPU."""
        ids = self.document_ids
        # Each microbatch is asked: `equal` makes no tensor, and stops where ids differ.
        return ids.is_cpu and ids.equal(ids[:, :1].expand_as(ids))

    def without_weights(self) -> Self:
        """Return the same rows as padding, without targets."""
        targets = torch.full_like(self.targets, IGNORE_INDEX)
        return super().without_weights().evolve(targets=targets, padding=self.tokens.numel())

    @property
    def token_count(self) -> int:
        """The tokens of documents in all rows."""
        return self.tokens.numel() - self.padding


def token_batch(batch: Batch, reader: str) -> TokenBatch:
    """Return the batch if it has tokens. Raises UserError, which names the reader, for another class."""
    if isinstance(batch, TokenBatch):
        return batch
    leaves = ", ".join(batch.specs)
    raise UserError(f"{reader} reads rows of tokens, and the run's batches are {type(batch).__name__}: {leaves}", 2)


def target_bytes(targets: Tensor, weights: Tensor, bytes_by_id: Tensor) -> Tensor:
    """
    Sum the bytes that targets stand for, times the weights: float64 ().

    targets, weights: (rows, length); bytes_by_id: float64 (vocab_size,).
    """
    weighted = bytes_by_id[targets.clamp(min=0)] * weights
    return weighted[targets != IGNORE_INDEX].sum()


@runtime_checkable
class ReadsLeaves(Protocol):
    """A component class that reads leaves by their names."""

    batch_leaves: ClassVar[tuple[str, ...]]


@runtime_checkable
class WritesBatches(Protocol):
    """A component class that makes batches; None if another component makes them, such as a collator."""

    batch_type: ClassVar[type[Batch] | None]


def batch_types(node: NodeView) -> Iterator[tuple[NodeView, type[Batch]]]:
    """Yield the reachable nodes that make batches, with their batch classes."""
    for reached in node.reachable():
        component = reached.component
        if isinstance(component, WritesBatches) and component.batch_type is not None:
            yield reached, component.batch_type


@port
class PackedDataset(Protocol):
    """Rows of one length, with random access; rows of pairs of documents are `PairedDocuments`."""

    @property
    def batch_type(self) -> type[Batch] | None:
        """The batch class, a class attribute; None if another component makes the batches."""
        ...

    @property
    def length(self) -> int:
        """Tokens in a row; 1 if rows do not consist of tokens."""
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


@runtime_checkable
class PairedDocuments(Protocol):
    """
    A corpus of pairs of documents, rows that keep pairs together, or a loss that compares the documents of pairs.

    `check` refuses such rows with another loss, and such a loss with other rows.
    """

    pairs: ClassVar[bool]


def has_pairs(component: object) -> bool:
    """Return whether a component, which is an object or a class, has or compares pairs of documents."""
    return isinstance(component, PairedDocuments) and component.pairs


@runtime_checkable
class RowsOfTokens(Protocol):
    """Rows of documents of tokens."""

    @property
    def tokens(self) -> TokenCorpus:
        """The corpus of the documents."""
        ...


@runtime_checkable
class TracedRows(Protocol):
    """Rows with known sources of their documents."""

    def sources(self, split: Split, row: int) -> Sequence[str]:
        """Return the sources of the documents of a row, in order: a file and a position in it, for people."""
        ...


@attrs.frozen
class RowSource:
    """
    The training rows of one source of a mixture: `rows` of them from number `first` on, with `tokens` tokens.

    `weight` is its share of the tokens that are trained on, relative to those of other sources.
    """

    name: str
    first: int
    rows: int
    tokens: int
    weight: float


@port
@runtime_checkable
class MeasuredRows(PackedDataset, Protocol):
    """Rows that know where they come from, and how full each is."""

    def row_sources(self, split: Split) -> Sequence[RowSource]:
        """The sources of a split's rows, in the order of their rows; all rows are of one of them."""
        ...

    def row_tokens(self, split: Split) -> np.ndarray:
        """The tokens in each row that are no padding, int64 (rows,)."""
        ...


@port
class RowOrder(Protocol):
    """The order in which the rows of a source come in an epoch. It depends on seed, source and epoch only."""

    def rows_at(self, source: RowSource, epoch: int, places: np.ndarray) -> np.ndarray:
        """
        The rows at some places of an epoch, both from 0 to below `source.rows`, int64 (places,).

        Over all places each row comes once.
        """
        ...


Example = Mapping[str, Any]
"""
An example of a data set of one's own: a dict, of which a collator makes a row.

That of `data.pad_collator` reads `input_ids`, a sequence of token ids; `labels`, as many, of which IGNORE_INDEX is not
trained; and `weights`, as many, those of their losses. Only the first is needed. A `source` is for messages.
"""


@port
class Examples(Protocol):
    """A data set of one's own: examples of each split, the same on every rank and at every start."""

    def examples(self, split: Split) -> Iterable[Example]:
        """
        The examples of a split, as a list of dicts, as any other sequence, or as an iterable.

        A sequence is read when a row is needed, also by worker processes, to which it is pickled. Any other iterable is
        read into a list at once.
        """
        ...


@port
class Collator(Protocol):
    """Makes rows of examples, one of each."""

    @property
    def batch_type(self) -> type[Batch]:
        """The batch class, a class attribute."""
        ...

    def count(self, example: Example) -> int:
        """The number of tokens of an example; its row is at least as long."""
        ...

    def collate(self, examples: Sequence[Example], length: int) -> Batch:
        """The rows of examples that have at most `length` tokens, (examples, length) where tensors are of tokens."""
        ...


@port
class TrainingData(Protocol):
    """This rank's microbatches, step after step."""

    def next_step(self) -> list[Batch]:
        """This data-parallel rank's microbatches of the next step."""
        ...


@port
class MovableData(TrainingData, Protocol):
    """Training data in an endless order of rows, in which it can be moved on."""

    @property
    def position(self) -> int:
        """The place in the order with which the next step begins."""
        ...

    def continue_at(self, position: int) -> None:
        """Have the next step begin at a place in the order; the rows up to there are not seen."""
        ...


@port
class SourceProgress(Protocol):
    """How far training has come in each source of a mixture."""

    def tokens_by_source(self, step: int) -> Mapping[str, float]:
        """The tokens of each source in all steps up to and with this one, padding left out."""
        ...


@port
class ValidationData(Protocol):
    """A fixed set of validation rows, always in the same order."""

    def row_counts(self) -> tuple[int, int]:
        """How many rows all ranks evaluate together, and of how many they are taken."""
        ...

    def batches(self) -> Iterator[Batch]:
        """This data-parallel rank's microbatches, as many as on every other: ranks may wait for each other in one."""
        ...
