"""Rows with pairs of documents."""

import logging
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from drawloom.components.data.mixture import Mixture
from drawloom.components.data.packing.pairs import Pairs
from drawloom.components.data.token_arrays import TokenArrays
from drawloom.graph.project import Recipe


@attrs.frozen
class Documents:
    """Twenty pairs: documents 2n and 2n + 1 have tokens of the value n + 1 alone, and different lengths."""

    vocab_size: int = 99
    eos_id: int = 0
    pairs: ClassVar[bool] = True

    def documents(self, split: str) -> TokenArrays:
        return TokenArrays.concatenate([np.full(2 + number % 5, 1 + number // 2) for number in range(40)], np.uint16)


def test_both_of_a_pair_are_in_one_row(drawloom_opened: Any, job: Any) -> None:
    """Every pair is in one row, in order, with document numbers 2k and 2k + 1 there, and every token of it."""
    rows = drawloom_opened(Pairs(tokens=Documents(), job=job, length=16))
    batch = rows.batch("train", range(rows.count_rows("train")))
    seen = []
    for tokens, documents in zip(batch.tokens.tolist(), batch.document_ids.tolist(), strict=True):
        lengths: dict[tuple[int, int], list[int]] = {}
        for token, document in zip(tokens, documents, strict=True):
            if token:
                lengths.setdefault((token, document // 2), [0, 0])[document % 2] += 1
        assert len({pair for _, pair in lengths}) == len(lengths), "two pairs have one number"
        seen += [(value, *sizes) for (value, _), sizes in lengths.items()]
    assert sorted(seen) == [(n + 1, 2 + 2 * n % 5, 2 + (2 * n + 1) % 5) for n in range(20)]
    assert rows.fill_rate("train") > 0.9
    order = [value for value, *_ in seen]
    assert order != sorted(order), "pairs are not shuffled"


def test_a_pair_that_fills_a_row_is_kept_and_a_longer_one_dropped(
    drawloom_opened: Any, job: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A row takes a pair of exactly its length; longer ones are counted and dropped, and never cut."""
    with caplog.at_level(logging.WARNING, "drawloom.data"):
        rows = drawloom_opened(Pairs(tokens=Documents(), job=job, length=9))
    assert "4 of 20 pairs are longer than a row of 9 tokens, and are dropped; the longest has 11 tokens" in caplog.text
    batch = rows.batch("validation", range(rows.count_rows("validation")))
    values, counts = np.unique(batch.tokens[batch.tokens > 0], return_counts=True)
    sizes = {n + 1: 4 + 2 * n % 5 + (2 * n + 1) % 5 for n in range(20)}
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == {n: s for n, s in sizes.items() if s <= 9}


CORPUS: dict[str, Any] = {
    "tokenizer": {"use": "data.hugging_face_tokenizer", "path": "tokenizer"},
    "tokens": {"use": "data.preferences", "paths": ["a.jsonl"]},
}
PACKING: dict[str, Any] = {"packing": {"use": "data.packing.pairs"}}
MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "a corpus": (
        CORPUS,
        '[tokens] has pairs of documents, which this packing would separate; write use = "data.packing.pairs"',
    ),
    "a packing": (PACKING, '[tokens] has no pairs of documents; write use = "data.preferences" in [tokens]'),
    "a source of a mixture": (
        {
            "tokenizer": CORPUS["tokenizer"],
            "tokens": {"use": "data.mixture", "sources": {"a": CORPUS["tokens"], "b": {**CORPUS["tokens"]}}},
        },
        "[tokens.sources.a] has pairs of documents, which this packing would separate",
    ),
    "no loss": (CORPUS | PACKING, "[loss] would learn both documents of each pair in [packing]; write"),
    "a loss": (
        {"loss": {"use": "loss.dpo"}},
        "[loss] compares pairs of documents, and [packing] makes none; write use",
    ),
    "kernels": (
        CORPUS | {"packing": PACKING["packing"] | {"share_prompts": True}},
        'texts would not see their common beginning in [packing]; write use = "kernels.auto" and attention',
    ),
}


@pytest.mark.parametrize("what", MISFITS)
def test_pairs_come_apart_in_no_recipe(what: str) -> None:
    """A corpus, a packing or a loss of pairs without the others is a problem with a remedy."""
    tables, text = MISFITS[what]
    packing = {"use": "data.packing.padded"} | tables.get("packing", {}) | {"length": 16}
    problems = Recipe.load("first_run").with_values({**tables, "packing": packing}).graph.problems
    assert any(text in str(problem) for problem in problems), problems


def test_pairs_of_a_mixture_stay_together(drawloom_opened: Any, job: Any) -> None:
    """With two sources, rows have whole pairs from a single source."""
    mixture = Mixture(sources={"a": Documents(), "b": Documents()}, weights={"a": 1, "b": 2})
    rows = drawloom_opened(Pairs(tokens=mixture, job=job, length=16))
    batch = rows.batch("train", range(rows.count_rows("train")))
    for tokens, documents in zip(batch.tokens.tolist(), batch.document_ids.tolist(), strict=True):
        values = {(document // 2, token) for token, document in zip(tokens, documents, strict=True) if token}
        assert len(values) == len(dict(values)), "two values are in one pair"
    assert [source.rows for source in rows.row_sources("train")] == [rows.count_rows("train") // 2] * 2
