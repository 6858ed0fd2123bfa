"""A dataset of user-defined examples, batched by a collator."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import attrs
from torch import Tensor

from drawloom import Every, ResolvedRecipe, UserError, between, component, internal, setting
from drawloom.components.data.batch_checks import compute_row_digests
from drawloom.components.data.packing.row_checks import check_rows_are_unchanged, warn_of_long_texts
from drawloom.components.data.token_arrays import warn_while_reading
from drawloom.ports import (
    MAX_LENGTH,
    Batch,
    Collator,
    Example,
    Examples,
    LanguageModel,
    NodeState,
    ReadableBeforeOpen,
    Split,
    TokenBatch,
    find_length_fault,
)

SPLITS: tuple[Split, ...] = ("train", "validation")
MAX_ROWS_COMPARED = 64  # rows of each split whose content is compared when a run resumes


@component
class Collated:
    """
    One row per example, padded to the longest example.

    A run resumes only with equally many examples and the same content in a sample, evenly spread over the split.
    """

    batch_type: ClassVar[None] = None  # the collator makes the batches

    data: Examples
    collator: Collator
    models: Every[LanguageModel] = attrs.field(factory=Every)
    recipe: ResolvedRecipe = attrs.field(factory=lambda: ResolvedRecipe("", ""))
    max_length: int = setting("maximum sequence length per example, in tokens", check=between(2, MAX_LENGTH + 1))
    multiple: int = setting(
        "rows are padded to a multiple of this length, at most to `max_length`",
        default=1,
        check=between(1, MAX_LENGTH + 1),
    )
    length: int = internal(0)
    _splits: dict[Split, Sequence[Example]] = internal(factory=dict)
    _vocab_size: int | None = internal(None)
    _tokens: dict[Split, int] = internal(factory=dict)

    def check_before_open(self) -> None:
        """Raise UserError if there is no example."""
        if isinstance(self.data, ReadableBeforeOpen) and not any(True for _ in self.data.read_before_open()):
            raise UserError("data: there is no example; name files or an environment with some")

    def open(self) -> None:
        """Measure all examples. Raises UserError for an example that is too long or rejected by the collator."""
        self._vocab_size = min((model.vocab_size for model in self.models.values()), default=None)
        longest = 2
        for split in SPLITS:
            rows: Any = self.data.examples(split)
            name = f"{type(self.data).__name__}.examples({split!r})"
            # a dataset of Hugging Face is indexable, but not a Sequence
            is_indexable = hasattr(rows, "__getitem__") and hasattr(rows, "__len__")
            self._splits[split] = rows if is_indexable else list(warn_while_reading(rows, name))
            indices = warn_while_reading(range(len(self._splits[split])), name)
            counts = [self._count_example_tokens(split, index) for index in indices]
            longest, self._tokens[split] = max([longest, *counts]), sum(counts)
        self.length = min(-(-longest // self.multiple) * self.multiple, self.max_length)
        if fault := find_length_fault(self.models, self.length):
            raise UserError(f"examples: {fault}")
        warn_of_long_texts(longest, self.models)

    def close(self) -> None:
        """Free the examples."""
        self._splits.clear()

    def count_rows(self, split: Split) -> int:
        return len(self._splits[split])

    def fill_rate(self, split: Split) -> float:
        return self._tokens[split] / (self.count_rows(split) * self.length) if self.count_rows(split) else 1.0

    def batch(self, split: Split, indices: Sequence[int]) -> Batch:
        """Return the examples' rows. Raises UserError with the name of an example that can't be collated."""
        try:
            batch = self._collate_rows(split, indices)
        except Exception:
            for index in indices:
                with self._add_example_name_to_errors(split, index):
                    self._collate_rows(split, [index])
            raise
        return batch

    def describe_row_origins(self, split: Split, row: int) -> list[str]:
        """Return the name of the row's example, as a list."""
        return [self._get_example_name(split, row)]

    def state_dict(self) -> NodeState:
        """Return row counts by split, and a sample's digest."""
        return {split: {"rows": self.count_rows(split), "sha256": self._hash_sampled_rows(split)} for split in SPLITS}

    def load_state_dict(self, state: NodeState) -> None:
        """Raise UserError if the run began with other rows, unless --accept-changes is set."""
        check_rows_are_unchanged(state, self.state_dict(), accept_changes=self.recipe.accept_changes)

    def _collate_rows(self, split: Split, indices: Sequence[int]) -> Batch:
        """Collate examples. Raises ValueError if the batch has another class, or ids outside the vocabulary."""
        batch = self.collator.collate([self._splits[split][index] for index in indices], self.length)
        if not isinstance(batch, self.collator.batch_type):
            expected = self.collator.batch_type.__name__
            raise ValueError(f"its batch is a {type(batch).__name__}, and the collator's batch_type is {expected}")
        if isinstance(batch, TokenBatch) and self._vocab_size is not None:
            check_ids_are_in_vocabulary(batch.tokens, self._vocab_size)
        return batch

    def _count_example_tokens(self, split: Split, index: int) -> int:
        """Count an example's tokens. Raises UserError if they are more than `max_length`."""
        with self._add_example_name_to_errors(split, index):
            tokens = self.collator.count_tokens(self._splits[split][index])
            if tokens > self.max_length:
                raise ValueError(f"it has {tokens} tokens, and rows {self.max_length}; cut it, or raise max_length")
            return tokens

    @contextmanager
    def _add_example_name_to_errors(self, split: Split, index: int) -> Iterator[None]:
        """Add the example's name to an error."""
        try:
            yield
        except Exception as error:
            reason = str(error) if isinstance(error, ValueError | UserError) else f"{type(error).__name__}: {error}"
            raise UserError(f"{self._get_example_name(split, index)}: {reason}") from error

    def _get_example_name(self, split: Split, index: int) -> str:
        """Return an example's `source`, or else its number."""
        try:
            source = self._splits[split][index].get("source")
        except Exception:  # the example itself may be what can't be read
            source = None
        return str(source) if source else f"example {index} of {split}"

    def _hash_sampled_rows(self, split: Split) -> str:
        """Hash up to MAX_ROWS_COMPARED rows, evenly spread over a split."""
        count = self.count_rows(split)
        spread = (index * count // MAX_ROWS_COMPARED for index in range(MAX_ROWS_COMPARED))
        rows = [*spread] if count > MAX_ROWS_COMPARED else range(count)
        return hashlib.sha256("".join(compute_row_digests(self.batch(split, rows))).encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        """Return only the picklable parts that a worker process needs: the examples and the collator."""
        return {**self.__dict__, "data": None, "recipe": None, "models": None}


def check_ids_are_in_vocabulary(ids: Tensor, vocab_size: int) -> None:
    """Raise ValueError if token ids, int64 (rows, length), are outside the vocabulary."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"it has ids outside of the model's vocabulary, 0 to {vocab_size - 1}")
