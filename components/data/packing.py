"""Packs documents into rows: tokenized once, laid end to end, cut to length."""

import logging
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from drawloom.components.data.order import permutation
from drawloom.components.data.packed import Packed, pack
from drawloom.components.ports.data import Batch, Corpus, Split, Tokenizer
from drawloom.components.ports.model import Model
from drawloom.components.ports.run import RunInfo
from drawloom.graph import Every, ResolvedRecipe, UserError, component, setting

SPLITS: tuple[Split, ...] = ("train", "validation")

log = logging.getLogger("drawloom.data")


@component
class Packing:
    """
    Documents, each with its end, cut into rows; a document that crosses a row's end restarts in the next row.

    Training documents are shuffled by the run's seed, validation documents stay in the order of the corpus. Empty
    documents are dropped. The last row is padded with ends that have no target. A run resumes only with the rows that
    it began with: a changed corpus is refused.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    job: RunInfo
    models: Every[Model] = attrs.field(factory=Every)
    recipe: ResolvedRecipe = attrs.field(factory=lambda: ResolvedRecipe("", ""))
    length: int = setting(
        check=lambda length: None if length >= 2 else f"a row of {length} tokens has nothing to predict",
        doc="tokens in a row, at least 2",
    )
    _packed: dict[Split, Packed] = attrs.field(init=False, factory=dict)

    def open(self) -> None:
        """Tokenize both splits into memory: two bytes per token up to 65,536 ids, else four."""
        for split in SPLITS:
            self._packed[split] = self._pack(split)

    def close(self) -> None:
        """Free the tokens."""
        self._packed.clear()

    def check_run(self) -> None:
        """Raise UserError if the tokenizer has more ids than any model of the run."""
        sizes = [model.vocab_size for model in self.models.values()]
        if sizes and max(sizes) < self.tokenizer.vocab_size:
            ids = self.tokenizer.vocab_size
            raise UserError(
                f"the tokenizer has {ids} ids, but the model's vocabulary only {max(sizes)}; "
                f"write vocab_size = {ids} in the model, or use another tokenizer",
                exit_code=2,
            )

    def count(self, split: Split) -> int:
        """The number of rows of a split; 0 if it has no document."""
        return self._packed[split].rows

    def batch(self, split: Split, indices: Sequence[int]) -> Batch:
        """The rows at these indices, each from 0 to below count; every tensor is (rows, length), int64."""
        return self._packed[split].batch(indices)

    def state_dict(self) -> dict[str, Any]:
        """The fingerprint of each split's rows."""
        return {split: self._packed[split].fingerprint for split in SPLITS}

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

    def _pack(self, split: Split) -> Packed:
        dtype = np.uint16 if self.tokenizer.vocab_size <= 1 << 16 else np.int32
        encoded = (self.tokenizer.encode(text).astype(dtype) for text in self.corpus.documents(split))
        # an empty document would be a row's end token without anything before it
        documents = [document for document in encoded if len(document)]
        if split == "train":
            order = permutation(self.job.seed, "documents", 0, len(documents))
            documents = [documents[index] for index in order]
        return pack(documents, self.tokenizer.eos_id, self.length, dtype)

    def __getstate__(self) -> dict[str, Any]:
        """The rows only: what a worker process needs, and what can be pickled."""
        return {**self.__dict__, "corpus": None, "tokenizer": None, "job": None, "recipe": None, "models": None}


def _rows(then: dict[str, Any], now: dict[str, Any]) -> str:
    """How the rows differ, for the message."""
    if then["rows"] == now["rows"]:
        return f"other tokens in its {then['rows']} rows"
    return f"{then['rows']} rows, and has {now['rows']}"
