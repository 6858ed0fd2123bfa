"""Shared by the packings: the order of documents, the index of each split, batches, and the check of a resumed run."""

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from drawloom.components.data.order import Permutation
from drawloom.components.data.packing.rows import RowIndex, batch_of
from drawloom.components.ports.corpus import Split, TokenCorpus, TokenDocuments
from drawloom.components.ports.data import Batch, has_pairs
from drawloom.components.ports.model import Model
from drawloom.components.ports.run import RunInfo
from drawloom.graph import Every, Problem, ResolvedRecipe, UserError, inherited, setting
from drawloom.graph.build.node import NodeView

SPLITS: tuple[Split, ...] = ("train", "validation")

log = logging.getLogger("drawloom.data")


@attrs.frozen
class PackedSplit:
    """The documents of a split, and the index of its rows: all that a worker process needs."""

    documents: TokenDocuments
    index: RowIndex


@inherited
class PackedRows:
    """
    Rows of documents, packed by index: tokens are read when a batch is made.

    Training documents are shuffled by the run's seed, validation documents stay in the order of the corpus. Documents
    of fewer than two tokens have nothing to predict and are dropped. A run resumes only with the documents that it
    began with.
    """

    tokens: TokenCorpus
    job: RunInfo
    models: Every[Model] = attrs.field(factory=Every)
    recipe: ResolvedRecipe = attrs.field(factory=lambda: ResolvedRecipe("", ""))
    length: int = setting(
        check=lambda length: None if length >= 2 else f"a row of {length} tokens has nothing to predict",
        doc="tokens in a row, at least 2",
    )
    _pad: int = attrs.field(init=False, default=0)
    _splits: dict[Split, PackedSplit] = attrs.field(init=False, factory=dict)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Pairs of documents stay together only in rows that are made of pairs."""
        for tokens in node.neighbours("tokens"):
            if has_pairs(tokens.component) and not has_pairs(cls):
                text = f"[{tokens.name}] has pairs of documents, which would come apart"
                yield node.problem("use", text, 'write use = "data.packing.pairs"')
            elif has_pairs(cls) and not has_pairs(tokens.component):
                text = f"[{tokens.name}] has no pairs of documents"
                yield node.problem("use", text, f'write use = "data.preferences" in [{tokens.name}]')

    @abstractmethod
    def index_of(self, lengths: np.ndarray, order: np.ndarray) -> RowIndex:
        """The rows of documents; lengths: (documents,), order: the numbers of documents to pack, one after another."""

    def open(self) -> None:
        """Pack both splits."""
        self._pad = self.tokens.eos_id
        for split in SPLITS:
            self._splits[split] = packed = self._pack(split)
            rows = packed.index.rows
            log.info(
                "%s: %d documents in %d rows of %d, %.2f %% filled",
                *(split, len(packed.documents.lengths), rows, self.length, 100 * self.fill_rate(split)),
            )

    def close(self) -> None:
        """Free the index."""
        self._splits.clear()

    def check_run(self) -> None:
        """Raise UserError if there are more token ids than any model of the run has."""
        sizes = [model.vocab_size for model in self.models.values()]
        if sizes and max(sizes) < self.tokens.vocab_size:
            ids = self.tokens.vocab_size
            raise UserError(
                f"the tokenizer has {ids} ids, but the model's vocabulary only {max(sizes)}; "
                f"write vocab_size = {ids} in the model, or use another tokenizer",
                exit_code=2,
            )

    def count(self, split: Split) -> int:
        """The number of rows of a split; 0 if it has no document."""
        return self._splits[split].index.rows

    def fill_rate(self, split: Split) -> float:
        """The fraction of a split's rows that is no padding; 1 if there are none."""
        index = self._splits[split].index
        return index.tokens / (index.rows * self.length) if index.rows else 1.0

    def batch(self, split: Split, indices: Sequence[int]) -> Batch:
        """The rows at these indices, each from 0 to below count; every tensor is (rows, length)."""
        packed = self._splits[split]
        return batch_of(packed.documents, [packed.index.pieces(row) for row in indices], self.length, self._pad)

    def sources(self, split: Split, row: int) -> list[str]:
        """Where the documents of a row come from, in order."""
        packed = self._splits[split]
        return [packed.documents.source(piece.document) for piece in packed.index.pieces(row)]

    def state_dict(self) -> dict[str, Any]:
        """The fingerprint of each split's rows."""
        return {split: self._fingerprint(split) for split in SPLITS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise UserError if the run began with other rows, unless changes are accepted."""
        now = self.state_dict()
        other = [f"{split} had {_rows(state[split], now[split])}" for split in SPLITS if state[split] != now[split]]
        if other and not self.recipe.accept_changes:
            raise UserError(
                f"the corpus is not the one that this run began with: {', and '.join(other)}; restore the old one, "
                "use another run name, or add --accept-changes",
                exit_code=2,
            )
        if other:
            log.warning("the corpus is not the one that this run began with: %s", ", and ".join(other))

    def _pack(self, split: Split) -> PackedSplit:
        documents = self.tokens.documents(split)
        lengths = documents.lengths
        packed = lengths >= 2
        count = int(packed.sum())
        order = Permutation(self.job.seed, "documents", 0, count).all() if split == "train" else np.arange(count)
        if count < len(lengths):
            order = np.flatnonzero(packed)[order]
        return PackedSplit(documents, self.index_of(lengths, order))

    def _fingerprint(self, split: Split) -> dict[str, Any]:
        kind = f"{type(self).__name__} {self.length} {self._splits[split].documents.fingerprint}"
        return {"rows": self.count(split), "sha256": hashlib.sha256(kind.encode()).hexdigest()}

    def __getstate__(self) -> dict[str, Any]:
        """The rows only: what a worker process needs, and what can be pickled."""
        return {**self.__dict__, "tokens": None, "job": None, "recipe": None, "models": None}


def _rows(then: dict[str, Any], now: dict[str, Any]) -> str:
    """How the rows differ, for the message."""
    if then["rows"] == now["rows"]:
        return f"other tokens in its {then['rows']} rows"
    return f"{then['rows']} rows, and has {now['rows']}"
