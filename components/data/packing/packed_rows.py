"""Base class for packings: document order, row indexes, batches, and the check on resume."""

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import numpy as np
import torch

from drawloom import Every, NodeView, Problem, ResolvedRecipe, UserError, internal, setting
from drawloom.components.data.packing.pieces import RowIndex
from drawloom.graph import component_base_class
from drawloom.ports import (
    MAX_LENGTH,
    Batch,
    LanguageModel,
    NodeState,
    RowSource,
    RunInfo,
    Split,
    TeacherPredictions,
    TokenBatch,
    TokenCorpus,
    find_length_fault,
    uses_preference_pairs,
)

if TYPE_CHECKING:
    from drawloom.components.data.order.permutation import Permutation
    from drawloom.components.data.packing.batches import PackedSplit


def select_trainable_documents(lengths: np.ndarray, order: "Permutation | None") -> np.ndarray:
    """Return the documents with at least two tokens, in order, int (selected,); without an order, sorted by number."""
    documents = np.arange(len(lengths)) if order is None else order.permute_all()
    return documents if (lengths >= 2).all() else documents[lengths[documents] >= 2]


SPLITS: tuple[Split, ...] = ("train", "validation")

log = logging.getLogger("drawloom.data")


def find_document_nodes(packing: NodeView) -> Iterator[NodeView]:
    """Yield the nodes with the packed documents: the token corpus, or a mixture's sources."""
    for tokens in packing.neighbours("tokens"):
        yield from tokens.neighbours("sources") or [tokens]


def _describe_length_fault(length: int) -> str | None:
    """Return the problem with a row length, or None."""
    if length < 2:
        return f"a row of {length} tokens has nothing to predict"
    return f"a row of {length} tokens is longer than {MAX_LENGTH}" if length > MAX_LENGTH else None


@component_base_class
class PackedRows:
    """
    Base for rows with packed documents; a row's tokens are read when a batch is made.

    The run's seed shuffles the training documents; validation documents stay in corpus order. Documents with fewer than
    two tokens have nothing to predict and are dropped. A run resumes only with the documents that it began with.
    """

    batch_type: ClassVar[type[Batch]] = TokenBatch

    tokens: TokenCorpus
    job: RunInfo
    models: Every[LanguageModel] = attrs.field(factory=Every)
    recipe: ResolvedRecipe = attrs.field(factory=lambda: ResolvedRecipe("", ""))
    teacher: TeacherPredictions | None = None
    length: int = setting("sequence length: tokens in a row, at least 2", check=_describe_length_fault)
    _pad: int = internal(0)
    _splits: dict[Split, "PackedSplit"] = internal(factory=dict)
    _fingerprints: dict[str, Any] = internal(factory=dict)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Yield a problem if a packing separates document pairs, or packs non-existent pairs."""
        for source in find_document_nodes(node):
            if uses_preference_pairs(source.component) and not uses_preference_pairs(cls):
                text = f"[{source.name}] has pairs of documents, which this packing would separate"
                yield node.problem("use", text, 'write use = "data.packing.pairs"')
            elif uses_preference_pairs(cls) and not uses_preference_pairs(source.component):
                text = f"[{source.name}] has no pairs of documents"
                yield node.problem("use", text, f'write use = "data.preferences" in [{source.name}]')

    @abstractmethod
    def build_row_index(self, lengths: np.ndarray, order: "Permutation | None") -> RowIndex:
        """Pack a source's documents, in `order` or sorted by number; lengths: (documents,)."""

    def open(self) -> None:
        """Pack both splits, and warn about texts too long for a model."""
        self._pad = self.tokens.eos_id
        for split in SPLITS:
            self._splits[split] = packed = self._pack_split(split)
            for source, index in zip(packed.sources, packed.index.members, strict=True):
                rate = 100 * index.tokens / (index.rows * self.length) if index.rows else 100
                log.info(
                    "%s: %d documents in %d rows of %d, %.2f %% filled",
                    *(
                        _format_split_name(split, source.name),
                        len(source.documents.lengths),
                        index.rows,
                        self.length,
                        rate,
                    ),
                )
        from drawloom.components.data.packing.row_checks import warn_of_long_texts

        if self.teacher is not None:
            self.teacher.check_written_for_rows(self.identity())
        lengths = [packed.documents.lengths for packed in self._splits.values()]
        longest = max((int(counts.max()) for counts in lengths if len(counts)), default=0)
        warn_of_long_texts(min(longest, self.length), self.models)

    def close(self) -> None:
        """Drop both splits' packed rows and their fingerprints."""
        self._splits.clear()
        self._fingerprints.clear()

    def check_before_open(self) -> None:
        """Raise UserError if the tokenizer has more ids than every model, or a model too few learned positions."""
        if fault := find_length_fault(self.models, self.length):
            raise UserError(f"length: {fault}")
        sizes = [model.vocab_size for model in self.models.values()]
        if sizes and max(sizes) < self.tokens.vocab_size:
            ids = self.tokens.vocab_size
            raise UserError(
                f"the tokenizer has {ids} ids, but the model's vocabulary only {max(sizes)}; "
                f"write vocab_size = {ids} in the model, or use another tokenizer"
            )

    def count_rows(self, split: Split) -> int:
        return self._splits[split].index.rows

    def fill_rate(self, split: Split) -> float:
        index = self._splits[split].index
        return index.tokens / (index.rows * self.length) if index.rows else 1.0

    def batch(self, split: Split, indices: Sequence[int]) -> TokenBatch:
        """Return the rows at these indices, 0 to count - 1; every tensor is (rows, length)."""
        from drawloom.components.data.packing.batches import build_batch

        packed = self._splits[split]
        batch = build_batch(packed.documents, [packed.index.pieces(row) for row in indices], self.length, self._pad)
        if self.teacher is None:
            return batch
        ids, logps = (torch.from_numpy(part) for part in self.teacher.read_top_ids_and_logps(split, indices))
        return batch.evolve(teacher_ids=ids, teacher_logps=logps)

    def describe_row_origins(self, split: Split, row: int) -> list[str]:
        """Return a row's document sources, in order."""
        packed = self._splits[split]
        return [packed.documents.describe_origin(piece.document) for piece in packed.index.pieces(row)]

    def row_sources(self, split: Split) -> list[RowSource]:
        """Return a split's row sources; without a mixture, one source without a name."""
        packed = self._splits[split]
        parts = zip(packed.sources, packed.index.members, packed.index.first_rows, strict=False)
        return [
            RowSource(source.name, start, index.rows, index.tokens, source.weight) for source, index, start in parts
        ]

    def tokens_per_row(self, split: Split) -> np.ndarray:
        return np.concatenate([index.tokens_per_row() for index in self._splits[split].index.members])

    def identity(self) -> dict[str, Any]:
        """
        Return row counts and fingerprints by split and source, and the run's seed: together they determine all rows.
        """
        return {**self.state_dict(), "seed": self.job.seed}

    def state_dict(self) -> NodeState:
        """Return row counts and fingerprints by split and source, constant during a run."""
        if not self._fingerprints:
            for split in SPLITS:
                documents = self._splits[split].sources
                for source, rows in zip(documents, self.row_sources(split), strict=True):
                    identity = f"{type(self).__name__} {self.length} {source.documents.fingerprint}"
                    digest = hashlib.sha256(identity.encode()).hexdigest()
                    self._fingerprints[_format_split_name(split, source.name)] = {"rows": rows.rows, "sha256": digest}
        return dict(self._fingerprints)

    def load_state_dict(self, state: NodeState) -> None:
        """Raise UserError if the run began with other rows, unless --accept-changes is set."""
        from drawloom.components.data.packing.row_checks import check_rows_are_unchanged

        check_rows_are_unchanged(state, self.state_dict(), accept_changes=self.recipe.accept_changes)

    def _pack_split(self, split: Split) -> "PackedSplit":
        """Pack a split's documents, source by source; training documents are shuffled."""
        from drawloom.components.data.mixed_documents import list_document_sources
        from drawloom.components.data.order.permutation import Permutation
        from drawloom.components.data.packing.batches import JoinedIndexes, PackedSplit
        from drawloom.components.data.packing.row_checks import warn_of_cut_documents

        documents, first_documents, indexes = self.tokens.documents(split), [0], []
        for source in list_document_sources(documents):
            lengths = source.documents.lengths
            if not uses_preference_pairs(type(self)):
                warn_of_cut_documents(_format_split_name(split, source.name), source.documents, self.length)
            shuffled = Permutation(self.job.seed, f"documents {source.name}".strip(), 0, len(lengths))
            indexes.append(self.build_row_index(lengths, shuffled if split == "train" else None))
            first_documents.append(first_documents[-1] + len(lengths))
        return PackedSplit(documents, JoinedIndexes(tuple(indexes), tuple(first_documents)))

    def __getstate__(self) -> dict[str, Any]:
        """Return only the picklable parts for a worker process: the rows."""
        return {**self.__dict__, "tokens": None, "job": None, "recipe": None, "models": None}


def _format_split_name(split: Split, source: str) -> str:
    """Name a split, or one source in a split."""
    return f"{split} of {source}" if source else split
