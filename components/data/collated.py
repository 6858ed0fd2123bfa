"""Rows of examples of one's own, which a collator makes."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import attrs
from torch import Tensor

from drawloom.components.data.packing.packed_rows import check_rows, warn_of_long_texts
from drawloom.components.data.record import row_digests
from drawloom.components.ports.corpus import Split
from drawloom.components.ports.data import MAX_LENGTH, Collator, Example, Examples, TokenBatch
from drawloom.components.ports.model import LanguageModel
from drawloom.components.state.batch import Batch
from drawloom.graph import Every, ResolvedRecipe, UserError, between, component, setting

SPLITS: tuple[Split, ...] = ("train", "validation")
COMPARED = 64  # rows of each split whose content is compared when a run resumes


@component
class Collated:
    """
    A row for each example, as long as the longest one.

    A run resumes only with as many examples as it began with, and the same content of some that are evenly spread.
    """

    batch_type: ClassVar[None] = None  # the collator's

    data: Examples
    collator: Collator
    models: Every[LanguageModel] = attrs.field(factory=Every)
    recipe: ResolvedRecipe = attrs.field(factory=lambda: ResolvedRecipe("", ""))
    max_length: int = setting(check=between(2, MAX_LENGTH + 1), doc="tokens that an example may have at most")
    multiple: int = setting(
        default=1,
        check=between(1, MAX_LENGTH + 1),
        doc="the length of a row is rounded up to a multiple of this, up to `max_length`",
    )
    length: int = attrs.field(init=False, default=0)
    _splits: dict[Split, Sequence[Example]] = attrs.field(init=False, factory=dict)
    _vocab_size: int | None = attrs.field(init=False, default=None)
    _tokens: dict[Split, int] = attrs.field(init=False, factory=dict)

    def open(self) -> None:
        """Read all examples for their lengths. Raises UserError for one that the collator refuses or is too long."""
        self._vocab_size = min((model.vocab_size for model in self.models.values()), default=None)
        longest = 2
        for split in SPLITS:
            held: Any = self.data.examples(split)
            # also a data set of Hugging Face's, which is no Sequence
            self._splits[split] = held if hasattr(held, "__getitem__") and hasattr(held, "__len__") else list(held)
            counts = [self._count(split, number) for number in range(len(self._splits[split]))]
            longest, self._tokens[split] = max([longest, *counts]), sum(counts)
        self.length = min(-(-longest // self.multiple) * self.multiple, self.max_length)
        warn_of_long_texts(longest, self.models)

    def close(self) -> None:
        """Free the examples."""
        self._splits.clear()

    def count(self, split: Split) -> int:
        """The number of examples of a split."""
        return len(self._splits[split])

    def fill_rate(self, split: Split) -> float:
        """The fraction of a split's rows that is no padding; 1 if there are none."""
        return self._tokens[split] / (self.count(split) * self.length) if self.count(split) else 1.0

    def batch(self, split: Split, indices: Sequence[int]) -> Batch:
        """The rows of these examples. Raises UserError that names one of which no row can be made."""
        try:
            batch = self._rows(split, indices)
        except Exception:
            for number in indices:
                with self._named(split, number):
                    self._rows(split, [number])
            raise
        return batch

    def sources(self, split: Split, row: int) -> list[str]:
        """Where the example of a row comes from."""
        return [self._name(split, row)]

    def state_dict(self) -> dict[str, Any]:
        """The number of rows of each split, and a digest of some."""
        return {split: {"rows": self.count(split), "sha256": self._digest(split)} for split in SPLITS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise UserError if the run began with other rows, unless changes are accepted."""
        check_rows(state, self.state_dict(), accept_changes=self.recipe.accept_changes)

    def _rows(self, split: Split, indices: Sequence[int]) -> Batch:
        batch = self.collator.collate([self._splits[split][number] for number in indices], self.length)
        if not isinstance(batch, self.collator.batch_type):
            wanted = self.collator.batch_type.__name__
            raise ValueError(f"its batch is a {type(batch).__name__}, and the collator's batch_type is {wanted}")
        if isinstance(batch, TokenBatch) and self._vocab_size is not None:
            check_ids(batch.tokens, self._vocab_size)
        return batch

    def _count(self, split: Split, number: int) -> int:
        with self._named(split, number):
            tokens = self.collator.count(self._splits[split][number])
            if tokens > self.max_length:
                raise ValueError(f"it has {tokens} tokens, and rows {self.max_length}; cut it, or raise max_length")
            return tokens

    @contextmanager
    def _named(self, split: Split, number: int) -> Iterator[None]:
        """Turn an error into one that names the example."""
        try:
            yield
        except Exception as error:
            what = str(error) if isinstance(error, ValueError | UserError) else f"{type(error).__name__}: {error}"
            raise UserError(f"{self._name(split, number)}: {what}") from error

    def _name(self, split: Split, number: int) -> str:
        try:
            source = self._splits[split][number].get("source")
        except Exception:  # the example itself may be what can't be read
            source = None
        return str(source) if source else f"example {number} of {split}"

    def _digest(self, split: Split) -> str:
        count = self.count(split)
        rows = [number * count // COMPARED for number in range(COMPARED)] if count > COMPARED else range(count)
        return hashlib.sha256("".join(row_digests(self.batch(split, rows))).encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        """The examples and the collator: what a worker process needs, and what can be pickled."""
        return {**self.__dict__, "data": None, "recipe": None, "models": None}


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Raise ValueError for token ids, int64 (rows, length), that a vocabulary does not have."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"it has ids outside of the model's vocabulary, 0 to {vocab_size - 1}")
