"""Ports for training data: packed rows, batches, and a teacher's stored predictions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import attrs
import numpy as np
import torch
from torch import Tensor

from drawloom import NodeView, UserError, port
from drawloom.components.ports.corpus import Split, TokenCorpus
from drawloom.components.state.batch import Batch, leaf

IGNORE_INDEX = -100
"""The target of a token without a loss, as in torch's cross_entropy."""

MAX_LENGTH = 100_000_000
"""The maximum sequence length: ten times the longest contexts in use."""

PLANNED_TEACHER_TOKENS = 64
"""Teacher tokens per position in plans, which do not know the stored number."""


class TokenBatch(Batch):
    """
    Microbatch with packed documents; tensors have shape (rows, length) and dtype int64 unless another is named.

    `targets` is the next token, or IGNORE_INDEX if there is nothing to learn. `positions` counts from 0 in every
    document. `document_ids` numbers a row's documents: attention stays inside equal numbers. `weights`, non-negative
    float32, weights the token losses, 0 without a target.

    In rows of pairs, `document_ids` is even for the preferred document and the next number for the other one; the
    token weights of a pair add up to the pair's weight. `reference`, float32 or float64, is for losses that compare
    the model with a reference model: the targets' log-probabilities under that model, used as a sum by document.

    `labels`, float32, is a document's number for the loss at its first token, such as the margin of a pair.
    `measured`, float64 (numbers,), are sums over the whole step, for a loss that is a `MeasuresStep`.

    `teacher_ids`, (rows, length, k), and `teacher_logps`, float32 (rows, length, k + 1), are a teacher's likeliest next
    tokens, and their log-probabilities with that of all others last. `teacher_states`, floating (rows, length, width),
    are a teacher model's last hidden states.

    `padding`, bool, is true at positions without a document's token: no count or mean of tokens includes them. None
    without padding.
    """

    tokens: Tensor = leaf("tokens")
    targets: Tensor = leaf("tokens")
    positions: Tensor = leaf("tokens")
    document_ids: Tensor = leaf("tokens")
    weights: Tensor = leaf("tokens")
    reference: Tensor | None = leaf("tokens", default=None)
    labels: Tensor | None = leaf("tokens", default=None)
    measured: Tensor | None = leaf("replicated", default=None)
    teacher_ids: Tensor | None = leaf("tokens", default=None)
    teacher_logps: Tensor | None = leaf("tokens", default=None)
    teacher_states: Tensor | None = leaf("tokens", default=None)
    padding: Tensor | None = leaf("tokens", default=None, kw_only=True)

    @classmethod
    def from_numpy(cls, **arrays: np.ndarray | None) -> Self:
        """Return a batch that shares memory with arrays (rows, length), by the names of its leaves."""
        given = {name: torch.from_numpy(array) for name, array in arrays.items() if array is not None}
        return cls(**given)

    @classmethod
    def make_meta_batch(cls, rows: int, length: int) -> Self:
        """Return a batch on the meta device, without a reference, and with `PLANNED_TEACHER_TOKENS` per position."""
        whole = torch.empty(rows, length, dtype=torch.int64, device="meta")
        ids = torch.empty(rows, length, PLANNED_TEACHER_TOKENS, dtype=torch.int64, device="meta")
        logps = torch.empty(rows, length, PLANNED_TEACHER_TOKENS + 1, device="meta")  # and all other tokens
        weights = torch.empty_like(whole, dtype=torch.float32)
        return cls(whole, whole, whole, whole, weights, teacher_ids=ids, teacher_logps=logps)

    def has_one_document_per_row(self) -> bool:
        """Return whether the host knows that every row is one document; False if the ids are on a GPU."""
        ids = self.document_ids
        # Called for each microbatch: `equal` allocates no tensor and stops at the first difference.
        return ids.is_cpu and ids.equal(ids[:, :1].expand_as(ids))

    def with_zero_weights(self) -> Self:
        """Return a copy to fill up a microbatch: the same rows without targets, counted as padding."""
        targets = torch.full_like(self.targets, IGNORE_INDEX)
        return (
            super().with_zero_weights().evolve(targets=targets, padding=torch.ones_like(self.tokens, dtype=torch.bool))
        )

    @property
    def visible_keys(self) -> Tensor:
        """The keys that a computed position sees in causal attention, itself included: int64 (rows, any)."""
        return count_visible_keys(self.document_ids)

    @property
    def token_count(self) -> int:
        """Number of tokens in all rows, without padding."""
        return self.tokens.numel() - (0 if self.padding is None else int(np.count_nonzero(self.padding.cpu().numpy())))


def count_visible_keys(document_ids: Tensor) -> Tensor:
    """
    Count the keys that each token sees in causal attention inside documents, itself included: int64 (rows, length).

    document_ids: int64 (rows, length); a document's tokens are consecutive.
    """
    positions = torch.arange(document_ids.shape[1]).expand_as(document_ids)
    is_start = torch.ones_like(document_ids, dtype=torch.bool)
    is_start[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = positions.where(is_start, 0)
    return positions - (starts.cummax(1).values if starts.numel() else starts) + 1


def require_token_batch(batch: Batch, reader: str) -> TokenBatch:
    """Return the batch if it is a TokenBatch. Raises UserError with the reader's name for another class."""
    if isinstance(batch, TokenBatch):
        return batch
    leaves = ", ".join(batch.specs)
    raise UserError(f"{reader} reads rows of tokens, and the run's batches are {type(batch).__name__}: {leaves}", 2)


def count_target_bytes(targets: Tensor, weights: Tensor, bytes_by_id: Tensor) -> Tensor:
    """
    Return the weighted byte count for the targets' text: float64 ().

    targets, weights: (rows, length); bytes_by_id: float64 (vocab_size,).
    """
    weighted = bytes_by_id[targets.clamp(min=0)] * weights
    return weighted[targets != IGNORE_INDEX].sum()


@runtime_checkable
class ReadsLeaves(Protocol):
    """A component class that reads fields of a batch, its leaves, by name."""

    batch_leaves: ClassVar[tuple[str, ...]]


@runtime_checkable
class WritesBatches(Protocol):
    """
    A component class that makes batches; `batch_type` is None if another component does, such as a collator.
    """

    batch_type: ClassVar[type[Batch] | None]


def find_batch_types(node: NodeView) -> Iterator[tuple[NodeView, type[Batch]]]:
    """Yield the nodes with a declared batch class, among a node and its dependencies, and these classes."""
    for reached in node.reachable():
        component = reached.component
        if isinstance(component, WritesBatches) and component.batch_type is not None:
            yield reached, component.batch_type


@port
class PackedDataset(Protocol):
    """Rows with one sequence length and random access; rows of document pairs are also `PairedDocuments`."""

    @property
    def batch_type(self) -> type[Batch] | None:
        """The batch class, a class attribute; None if another component makes the batches."""

    @property
    def length(self) -> int:
        """The sequence length: tokens in a row; 1 if rows do not consist of tokens."""

    def count_rows(self, split: Split) -> int:
        """Return a split's row count."""

    def fill_rate(self, split: Split) -> float:
        """
        Return the fraction of a split's positions that are not padding; 1 without rows.
        """

    def batch(self, split: Split, indices: Sequence[int]) -> Batch:
        """Return the rows at these indices."""


@runtime_checkable
class PairedDocuments(Protocol):
    """
    A corpus with document pairs, rows that keep pairs together, or a loss that compares a pair's documents.

    `check` rejects rows of pairs with another loss, and a pair loss with other rows.
    """

    pairs: ClassVar[bool]


def uses_preference_pairs(component: object) -> bool:
    """Return whether a component, an object or a class, has or compares document pairs."""
    return isinstance(component, PairedDocuments) and component.pairs


@runtime_checkable
class PromptedDocuments(Protocol):
    """Documents whose trained tokens answer a prompt before them: a cut separates the two."""

    answers_prompts: ClassVar[bool]


def answers_prompts(component: object) -> bool:
    """Return whether a source of documents, an object or a class, has trained tokens that answer a prompt."""
    return isinstance(component, PromptedDocuments) and component.answers_prompts


@runtime_checkable
class UnpairedAnswers(Protocol):
    """
    A corpus in which a pair is a judged answer and one to another prompt, or a loss for such pairs (KTO).

    `check` rejects one without the other.
    """

    unpaired: ClassVar[bool]


def uses_unpaired_answers(component: object) -> bool:
    """Return whether a component, an object or a class, has or reads judged answers without a counterpart."""
    return isinstance(component, UnpairedAnswers) and component.unpaired


@runtime_checkable
class RowsOfTokens(Protocol):
    """Rows made from token documents."""

    @property
    def tokens(self) -> TokenCorpus:
        """The documents' corpus."""


@runtime_checkable
class TracedRows(Protocol):
    """Rows with known document sources."""

    def describe_row_origins(self, split: Split, row: int) -> Sequence[str]:
        """Return the sources of a row's documents, in order: a file and a position, for messages."""


@attrs.frozen
class RowSource:
    """
    Training rows from one source in a mixture: `rows` rows from row `first` on, with `tokens` tokens.

    `weight` is the source's share of the trained tokens, relative to other sources' weights.
    """

    name: str
    first: int
    rows: int
    tokens: int
    weight: float


@port
@runtime_checkable
class MeasuredRows(PackedDataset, Protocol):
    """Rows with known sources and token counts."""

    def row_sources(self, split: Split) -> Sequence[RowSource]:
        """Return a split's sources in row order; every row belongs to a source."""

    def tokens_per_row(self, split: Split) -> np.ndarray:
        """Return token counts by row, without padding: int64 (rows,)."""


@port
class RowOrder(Protocol):
    """Order of a source's rows in an epoch, determined by the seed, the source and the epoch."""

    def rows_at(self, source: RowSource, epoch: int, positions: np.ndarray) -> np.ndarray:
        """
        Return the rows at positions in an epoch, both from 0 to below `source.rows`: int64 (positions,).

        All positions together visit every row once.
        """


Example = Mapping[str, Any]
"""
An example of a user's data set: a dict that a collator converts to a row.

`data.pad_collator` reads `input_ids`, a sequence of token ids, and two optional sequences of equal length: `labels`,
with IGNORE_INDEX for tokens that are not trained, and `weights`, the weights of their losses. Messages name the
`source`, if any.
"""


@port
class Examples(Protocol):
    """A user's data set: examples by split, equal on every rank and at every start."""

    def examples(self, split: Split) -> Iterable[Example]:
        """
        Return a split's examples as a list of dicts, as another sequence, or as an iterable.

        A sequence is read when a row is needed, also by worker processes, to which it is pickled. Any other iterable is
        read into a list at once.
        """


@port
class Collator(Protocol):
    """A converter from examples to rows, one row per example."""

    @property
    def batch_type(self) -> type[Batch]:
        """The batch class, a class attribute."""

    def count_tokens(self, example: Example) -> int:
        """Return an example's token count; its row is at least as long."""

    def collate(self, examples: Sequence[Example], length: int) -> Batch:
        """Return rows for examples with at most `length` tokens; token tensors are (examples, length)."""


@port
class TrainingData(Protocol):
    """This rank's microbatches, step by step."""

    def next_step(self) -> list[Batch]:
        """Return this data-parallel rank's microbatches for the next step."""


@port
class MovableData(TrainingData, Protocol):
    """Training data with an adjustable position in an endless row order, and token counts by source in a mixture."""

    @property
    def next_row_position(self) -> int:
        """The position in the order at which the next step begins."""

    def skip_to_position(self, position: int) -> None:
        """Skip the rows before a position in the order; the next step begins there."""

    def cumulative_tokens_by_source(self, step: int) -> Mapping[str, float]:
        """Return token counts by source in all steps up to and including `step`, without padding."""


@port
class ValidationData(Protocol):
    """Source of fixed validation microbatches, always in the same order."""

    def count_evaluated_and_total_rows(self) -> tuple[int, int]:
        """Return (rows evaluated by all ranks together, rows to choose from)."""

    def batches(self) -> Iterator[Batch]:
        """
        Yield this data-parallel rank's microbatches; their number is equal on all ranks, which may wait for one
        another.
        """


@port
class TeacherPredictions(Protocol):
    """Likeliest tokens by row, with their log-probabilities under the teacher."""

    def check_written_for_rows(self, identity: Mapping[str, Any]) -> None:
        """Raise UserError if the predictions belong to rows with another identity: fingerprints and a seed."""

    def read_top_ids_and_logps(self, split: Split, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """
        Return ids, int64 (rows, length, k), and log-probabilities, float32 (rows, length, k + 1), of the rows.

        Position i predicts token i + 1, as targets do. The last log-probability is that of all other tokens together.
        """
