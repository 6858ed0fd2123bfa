"""Contracts for training data ports: packed rows and batches."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from drawloom.graph.testing import BrokenContractError, expect
from drawloom.ports import (
    IGNORE_INDEX,
    Batch,
    Collator,
    Example,
    Examples,
    MeasuredRows,
    PackedDataset,
    RowOrder,
    RowSource,
    Split,
    TokenBatch,
    require_token_batch,
)

SPLITS: tuple[Split, ...] = ("train", "validation")

TENSORS = ("tokens", "targets", "positions", "document_ids", "weights")
"""Names of the tensors in every batch of tokens."""


def batches_have_the_declared_class_and_sizes(rows: PackedDataset) -> None:
    """
    A batch has the declared class, a row for each index, and leaves with matching sizes.

    A token batch's tensors have shape (rows, length); weights are float32, the others int64.
    """
    expect(rows.length >= 1 and rows.count_rows("train") >= 1, "there are no rows, or rows without tokens")
    batch = rows.batch("train", [0, rows.count_rows("train") - 1])
    declared = rows.batch_type or Batch
    expect(isinstance(batch, declared), f"a batch is a {type(batch).__name__}, and batch_type is {declared.__name__}")
    # Raise BrokenContractError if a batch's leaves differ in rows or tokens
    try:
        batch.check()
    except ValueError as error:
        raise BrokenContractError(str(error)) from error
    expect(batch.row_count == 2, f"a batch of two rows has {batch.row_count}")
    for name in TENSORS if isinstance(batch, TokenBatch) else ():
        tensor, dtype = getattr(batch, name), torch.float32 if name == "weights" else torch.int64
        expect(tensor.dtype == dtype and tensor.shape == (2, rows.length), f"{name} is {tensor.dtype} {tensor.shape}")


def a_row_does_not_depend_on_other_rows(one: PackedDataset, other: PackedDataset) -> None:
    """A row does not depend on earlier batches or on the other rows in its batch."""
    last = one.count_rows("train") - 1
    expect(
        other.count_rows("train") == one.count_rows("train"),
        "two data sets with the same settings have different numbers of rows",
    )
    batch, reversed_batch = one.batch("train", [0, last]), other.batch("train", [last, 0])
    for (name, spec, tensor), (_, _, flipped) in zip(
        batch.named_tensors(), reversed_batch.named_tensors(), strict=True
    ):
        again = flipped if spec == "replicated" else flipped.flip(0)
        expect(torch.equal(tensor, again), f"{name} depend on the order")


def fill_rate_is_the_fraction_of_tokens(rows: PackedDataset) -> None:
    """The fill rate is in (0, 1], and equals the fraction of tokens that are not padding."""
    rate = rows.fill_rate("train")
    expect(0 < rate <= 1, f"a fill rate of {rate}")
    count = rows.count_rows("train")
    if count > 200:
        return
    batches = [rows.batch("train", [row]) for row in range(count)]
    targets = sum(int((batch.targets != IGNORE_INDEX).sum()) for batch in batches if isinstance(batch, TokenBatch))
    expect(targets <= rate * count * rows.length, f"{targets} targets at a fill rate of {rate}")
    tokens = sum(batch.token_count for batch in batches)
    expect(tokens == round(rate * count * rows.length), f"{tokens} tokens at a fill rate of {rate}")


def targets_are_the_next_tokens(rows: PackedDataset) -> None:
    """A token's target is the next token in its document, and positions count from 0; only for token batches."""
    batch = rows.batch("train", list(range(min(8, rows.count_rows("train")))))
    if not isinstance(batch, TokenBatch):
        return
    inside = batch.document_ids[:, 1:] == batch.document_ids[:, :-1]
    step = batch.positions[:, 1:] - batch.positions[:, :-1]
    expect((step[inside] == 1).all(), "positions do not increase by one inside a document")
    expect((batch.positions[:, 1:][~inside] == 0).all(), "a document does not begin at position 0")
    learned = inside & (batch.targets[:, :-1] != IGNORE_INDEX)
    expect((batch.targets[:, :-1][learned] == batch.tokens[:, 1:][learned]).all(), "a target is not the next token")


def tokens_without_a_target_have_weight_0(rows: PackedDataset) -> None:
    """Weights are finite and nonnegative, 0 for tokens without a target, and not all 0."""
    batch = rows.batch("train", list(range(min(8, rows.count_rows("train")))))
    expect(
        bool(batch.weights.isfinite().all()) and bool((batch.weights >= 0).all()), "a weight is negative or infinite"
    )
    if isinstance(batch, TokenBatch):
        ignored = batch.weights[batch.targets == IGNORE_INDEX]
        expect(bool((ignored == 0).all()), "a token without a target has a weight")
    expect(bool(batch.weights.any()), "no token of the first rows has a weight")


def sources_partition_the_rows(rows: MeasuredRows) -> None:
    """Sources cover the rows without gaps, and the tokens in a source's rows add up to its token count."""
    for split in SPLITS:
        tokens, end = rows.tokens_per_row(split), 0
        for source in rows.row_sources(split):
            counts = tokens[end : end + source.rows]
            expect(source.first == end, f"{source} begins at {source.first}, and the rows before end at {end}")
            total = int(counts.sum())
            expect(total == source.tokens, f"{source} has {source.tokens} tokens, and its rows {total}")
            end += source.rows
        expect(end == len(tokens) == rows.count_rows(split), f"sources have {end} rows of {rows.count_rows(split)}")


SOURCES = [RowSource("one", 0, 7, 56, 1.0), RowSource("other", 7, 5, 40, 2.0)]


def an_epoch_has_every_row_once(order: RowOrder) -> None:
    """An epoch of a source contains every row once."""
    for source in SOURCES:
        for epoch in (0, 1, 5):
            rows = order.rows_at(source, epoch, np.arange(source.rows))
            expect(sorted(rows.tolist()) == list(range(source.rows)), f"epoch {epoch} has the rows {rows.tolist()}")


def an_index_always_has_the_same_row(one: RowOrder, other: RowOrder) -> None:
    """The row at an index in an epoch does not depend on earlier calls or their order."""
    epochs = [(source, epoch) for source in SOURCES for epoch in (0, 3)]
    orders = [one.rows_at(source, epoch, np.arange(source.rows)) for source, epoch in epochs]
    for (source, epoch), rows in reversed([*zip(epochs, orders, strict=True)]):
        for index in reversed(range(source.rows)):
            again = other.rows_at(source, epoch, np.array([index]))
            expect(again.tolist() == [rows[index]], f"index {index} of epoch {epoch} has row {rows[index]} and {again}")


def reading_again_yields_the_same_examples(one: Examples, other: Examples) -> None:
    """The training split has examples; they are dicts, and a second reading yields the same."""
    for split in SPLITS:
        first, again, others = (list(data.examples(split)) for data in (one, one, other))
        expect(first or split != "train", "the training split has no example")
        expect(all(isinstance(example, Mapping) for example in first), f"an example of {split} is not a dict")
        expect(
            _serialize_examples(first) == _serialize_examples(again) == _serialize_examples(others),
            f"a second time {split} has other examples",
        )


def _serialize_examples(examples: Sequence[Example]) -> str:
    # without sources, because two instances may read copies of a file at different paths
    return str([{key: value for key, value in example.items() if key != "source"} for example in examples])


EXAMPLES: list[Example] = [{"input_ids": [3, 4, 5]}, {"input_ids": [6, 7, 8, 9, 10], "weights": [1.0] * 5}]


def an_example_becomes_one_row_of_the_length(collator: Collator) -> None:
    """An example becomes one row with the requested length, with its tokens together, independent of other examples."""
    if not issubclass(collator.batch_type, TokenBatch):
        name = collator.batch_type.__name__
        raise BrokenContractError(
            f"the contract of collators has examples of tokens, not of {name}: test this collator in a run"
        )
    both = collator.collate(EXAMPLES, 6)
    for number, example in enumerate(EXAMPLES):
        ids, alone = [*example["input_ids"]], require_token_batch(collator.collate([example], 6), "the contract")
        expect(
            collator.count_tokens(example) == len(ids),
            f"{len(ids)} tokens are counted as {collator.count_tokens(example)}",
        )
        for name in TENSORS:
            single, shared = getattr(alone, name), getattr(both, name)[number]
            expect(single.shape == (1, 6) and torch.equal(single[0], shared), f"{name} depend on other rows")
        row = alone.tokens[0].tolist()
        starts = [start for start in range(7 - len(ids)) if row[start : start + len(ids)] == ids]
        expect(starts, f"the tokens {ids} are not in the row {row}")
        document = alone.document_ids[0, starts[0]]
        expect(int((alone.document_ids[0] == document).sum()) == len(ids), "padding is of the document of an example")
