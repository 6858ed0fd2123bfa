"""Contracts of the ports of training data: packed rows and batches."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from drawloom.components.ports.corpus import Split
from drawloom.components.ports.data import (
    IGNORE_INDEX,
    Collator,
    Example,
    Examples,
    MeasuredRows,
    MovableData,
    PackedDataset,
    RowOrder,
    RowSource,
    SourceProgress,
    TokenBatch,
    TrainingData,
    ValidationData,
    token_batch,
)
from drawloom.components.state.batch import Batch
from drawloom.graph.testing import BrokenContractError, expect

SPLITS: tuple[Split, ...] = ("train", "validation")

TENSORS = ("tokens", "targets", "positions", "document_ids", "weights")
"""The tensors that every batch of tokens has."""


def rows_have_one_length(rows: PackedDataset) -> None:
    """
    A batch is of the class that the data set declares, has a row for each index, and its leaves fit together.

    Of tokens, every tensor is of shape (rows, length), weights float32 and others int64.
    """
    expect(rows.length >= 1 and rows.count("train") >= 1, "there are no rows, or rows without tokens")
    batch = rows.batch("train", [0, rows.count("train") - 1])
    wanted = rows.batch_type or Batch
    expect(isinstance(batch, wanted), f"a batch is a {type(batch).__name__}, and batch_type is {wanted.__name__}")
    _expect_leaves_fit(batch)
    expect(batch.row_count == 2, f"a batch of two rows has {batch.row_count}")
    for name in TENSORS if isinstance(batch, TokenBatch) else ():
        tensor, dtype = getattr(batch, name), torch.float32 if name == "weights" else torch.int64
        expect(tensor.dtype == dtype and tensor.shape == (2, rows.length), f"{name} is {tensor.dtype} {tensor.shape}")


def rows_do_not_depend_on_the_order(one: PackedDataset, other: PackedDataset) -> None:
    """Rows do not depend on earlier batches, nor on the other rows of a batch."""
    last = one.count("train") - 1
    expect(
        other.count("train") == one.count("train"),
        "two data sets with the same settings have different numbers of rows",
    )
    batch, reversed_batch = one.batch("train", [0, last]), other.batch("train", [last, 0])
    for (name, spec, tensor), (_, _, flipped) in zip(
        batch.named_tensors(), reversed_batch.named_tensors(), strict=True
    ):
        again = flipped if spec == "replicated" else flipped.flip(0)
        expect(torch.equal(tensor, again), f"{name} depend on the order")


def rows_are_filled_as_they_say(rows: PackedDataset) -> None:
    """The fill rate is a fraction above 0, that of the rows without their padding, and allows all targets."""
    rate = rows.fill_rate("train")
    expect(0 < rate <= 1, f"a fill rate of {rate}")
    count = rows.count("train")
    if count > 200:
        return
    batches = [rows.batch("train", [row]) for row in range(count)]
    targets = sum(int((batch.targets != IGNORE_INDEX).sum()) for batch in batches if isinstance(batch, TokenBatch))
    expect(targets <= rate * count * rows.length, f"{targets} targets at a fill rate of {rate}")
    tokens = sum(batch.token_count for batch in batches)
    expect(tokens == round(rate * count * rows.length), f"{tokens} tokens at a fill rate of {rate}")


def targets_are_the_next_tokens(rows: PackedDataset) -> None:
    """A target is the next token of its document, where positions increase by one from 0; other rows have no order."""
    batch = rows.batch("train", list(range(min(8, rows.count("train")))))
    if not isinstance(batch, TokenBatch):
        return
    inside = batch.document_ids[:, 1:] == batch.document_ids[:, :-1]
    step = batch.positions[:, 1:] - batch.positions[:, :-1]
    expect((step[inside] == 1).all(), "positions do not increase by one inside a document")
    expect((batch.positions[:, 1:][~inside] == 0).all(), "a document does not begin at position 0")
    learned = inside & (batch.targets[:, :-1] != IGNORE_INDEX)
    expect((batch.targets[:, :-1][learned] == batch.tokens[:, 1:][learned]).all(), "a target is not the next token")


def tokens_without_a_target_weigh_nothing(rows: PackedDataset) -> None:
    """Weights are finite and not negative, 0 wherever there is no target, and not 0 everywhere."""
    batch = rows.batch("train", list(range(min(8, rows.count("train")))))
    expect(
        bool(batch.weights.isfinite().all()) and bool((batch.weights >= 0).all()), "a weight is negative or infinite"
    )
    if isinstance(batch, TokenBatch):
        idle = batch.weights[batch.targets == IGNORE_INDEX]
        expect(bool((idle == 0).all()), "a token without a target has a weight")
    expect(bool(batch.weights.any()), "no token of the first rows has a weight")


def _expect_leaves_fit(batch: Batch) -> None:
    """Raise BrokenContractError for a batch whose leaves do not agree in rows and tokens."""
    try:
        batch.check()
    except ValueError as error:
        raise BrokenContractError(str(error)) from error


def rows_are_of_one_source_each(rows: MeasuredRows) -> None:
    """Sources follow one another without gaps, and the tokens of their rows add up to those that they have."""
    for split in SPLITS:
        tokens, place = rows.row_tokens(split), 0
        for source in rows.row_sources(split):
            own = tokens[place : place + source.rows]
            expect(source.first == place, f"{source} begins at {source.first}, and the rows before end at {place}")
            expect(int(own.sum()) == source.tokens, f"{source} has {source.tokens} tokens, and its rows {own.sum()}")
            place += source.rows
        expect(place == len(tokens) == rows.count(split), f"sources have {place} rows of {rows.count(split)}")


SOURCES = [RowSource("one", 0, 7, 56, 1.0), RowSource("other", 7, 5, 40, 2.0)]


def each_row_comes_once(order: RowOrder) -> None:
    """In every epoch of a source, each of its rows has one place."""
    for source in SOURCES:
        for epoch in (0, 1, 5):
            rows = order.rows_at(source, epoch, np.arange(source.rows))
            expect(sorted(rows.tolist()) == list(range(source.rows)), f"epoch {epoch} has the rows {rows.tolist()}")


def a_place_has_one_row(one: RowOrder, other: RowOrder) -> None:
    """The row at a place depends on nothing that was asked for before, in whatever order places are."""
    wanted = [(source, epoch) for source in SOURCES for epoch in (0, 3)]
    found = [one.rows_at(source, epoch, np.arange(source.rows)) for source, epoch in wanted]
    for (source, epoch), rows in reversed([*zip(wanted, found, strict=True)]):
        for place in reversed(range(source.rows)):
            again = other.rows_at(source, epoch, np.array([place]))
            expect(again.tolist() == [rows[place]], f"place {place} of epoch {epoch} has row {rows[place]} and {again}")


def examples_come_again(one: Examples, other: Examples) -> None:
    """The training split has examples, which are dicts, the same each time."""
    for split in SPLITS:
        held, again, others = (list(each.examples(split)) for each in (one, one, other))
        expect(held or split != "train", "the training split has no example")
        expect(all(isinstance(example, Mapping) for example in held), f"an example of {split} is no dict")
        expect(_contents(held) == _contents(again) == _contents(others), f"a second time {split} has other examples")


def _contents(examples: Sequence[Example]) -> str:
    # two may be made of files at different places
    return str([{key: value for key, value in example.items() if key != "source"} for example in examples])


EXAMPLES: list[Example] = [{"input_ids": [3, 4, 5]}, {"input_ids": [6, 7, 8, 9, 10], "weights": [1.0] * 5}]


def a_row_is_an_example(collator: Collator) -> None:
    """Each example is a row of the length that is asked for, with its tokens together, whatever others there are."""
    if not issubclass(collator.batch_type, TokenBatch):
        name = collator.batch_type.__name__
        raise BrokenContractError(
            f"the contract of collators has examples of tokens, not of {name}: test this one in a run"
        )
    both = collator.collate(EXAMPLES, 6)
    for number, example in enumerate(EXAMPLES):
        ids, alone = [*example["input_ids"]], token_batch(collator.collate([example], 6), "the contract")
        expect(collator.count(example) == len(ids), f"{len(ids)} tokens are counted as {collator.count(example)}")
        for name in TENSORS:
            one, same = getattr(alone, name), getattr(both, name)[number]
            expect(one.shape == (1, 6) and torch.equal(one[0], same), f"{name} depend on other rows")
        row = alone.tokens[0].tolist()
        starts = [start for start in range(7 - len(ids)) if row[start : start + len(ids)] == ids]
        expect(starts, f"the tokens {ids} are not in the row {row}")
        own = alone.document_ids[0, starts[0] : starts[0] + len(ids)]
        expect(int((alone.document_ids[0] == own[0]).sum()) == len(ids), "padding is of the document of an example")


STEPS = 3


def it_is_a_function_of_the_step(one: TrainingData, other: TrainingData) -> None:
    """Two loaders with the same settings give the same microbatches, step by step."""
    for step in range(STEPS):
        ours, theirs = one.next_step(), other.next_step()
        expect(ours and len(ours) == len(theirs), f"step {step + 1} has {len(ours)} and {len(theirs)} microbatches")
        same = all(_are_equal(a, b) for a, b in zip(ours, theirs, strict=True))
        expect(same, f"step {step + 1} differs between two loaders with the same settings")


def it_continues_where_it_is_moved(data: MovableData) -> None:
    """Moved on past a step, the next one begins behind it; moved back, with the same rows."""
    start = data.position
    data.next_step()
    after = data.position
    expect(after > start, f"a step leaves the position at {after}")
    second = data.next_step()
    for position in (data.position, after):
        data.continue_at(position)
        expect(data.position == position, f"moved to {position} it is at {data.position}")
    again = data.next_step()
    same = all(_are_equal(a, b) for a, b in zip(second, again, strict=True))
    expect(same, "the rows at a place are others the second time")


def steps_differ(data: TrainingData) -> None:
    """Two consecutive steps have different data."""
    first, second = data.next_step(), data.next_step()
    same = len(first) == len(second) and all(_are_equal(a, b) for a, b in zip(first, second, strict=True))
    expect(not same, "the second step has the data of the first")


def tokens_of_sources_grow(progress: SourceProgress) -> None:
    """From step to step no source has fewer tokens, and all together have more."""
    found = [progress.tokens_by_source(step) for step in range(1, STEPS + 1)]
    for earlier, later in pairwise(found):
        expect(all(tokens <= later[name] for name, tokens in earlier.items()), f"{earlier} tokens become {later}")
        expect(sum(earlier.values()) < sum(later.values()), f"a step has no tokens: {earlier} and {later}")


def it_has_the_rows_that_it_counts(data: ValidationData) -> None:
    """There are at most as many rows as they are taken from; a single rank's microbatches have them all."""
    used, count = data.row_counts()
    found = sum(batch.row_count for batch in data.batches())
    expect(0 < found <= used <= count, f"{found} rows in microbatches, {used} of {count} by its own count")


def it_is_the_same_every_time(one: ValidationData, other: ValidationData) -> None:
    """The same microbatches in the same order, each time."""
    first = [*one.batches()]
    expect(first, "there are no microbatches")
    for again in ([*one.batches()], [*other.batches()]):
        same = len(again) == len(first) and all(map(_are_equal, first, again))
        expect(same, "a second pass has other microbatches")


def _are_equal(one: Batch, other: Batch) -> bool:
    """Whether two batches have equal tensors."""
    ours, theirs = one.tensors(), other.tensors()
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
