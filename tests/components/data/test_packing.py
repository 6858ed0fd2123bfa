"""Rows from documents."""

import json
import pickle
from collections import Counter
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from drawloom.components.data.bytes import Bytes
from drawloom.components.data.packing import Packing
from drawloom.components.ports.data import IGNORE_INDEX, Split
from drawloom.graph import ResolvedRecipe, UserError


@attrs.frozen
class Texts:
    """A corpus in memory."""

    train: list[str]
    held_out: list[str] = attrs.field(factory=list)

    def documents(self, split: Split) -> Iterator[str]:
        return iter(self.train if split == "train" else self.held_out)


def packing(corpus: Texts, job: Any, tokenizer: Any = None, length: int = 4) -> Packing:
    rows = Packing(corpus=corpus, tokenizer=tokenizer or Bytes(), job=job, length=length)
    rows.open()
    return rows


def stream(rows: Packing, split: Split) -> list[int]:
    """All targets of a split, in order."""
    targets = rows.batch(split, range(rows.count(split))).targets
    return targets[targets != IGNORE_INDEX].tolist()


def test_documents_end_with_the_end(job: Any) -> None:
    """Each document is followed by the tokenizer's end, which is learned; an empty one is as if it were not there."""
    rows = packing(Texts(train=["", "abc", ""]), job)
    assert rows.batch("train", [0]).tokens.tolist() == [[*b"abc", 256]]
    assert rows.batch("train", [0]).targets.tolist() == [[*b"bc", 256, IGNORE_INDEX]]


def test_splits_are_packed_apart(job: Any) -> None:
    """No row mixes documents of two splits, and a split without documents has no rows."""
    rows = packing(Texts(train=["abcdefgh"], held_out=[]), job)
    assert rows.count("train") == 2
    assert rows.count("validation") == 0
    assert packing(Texts(train=[], held_out=["abcdefgh"]), job).count("train") == 0


def test_learned_documents_are_shuffled_by_the_seed(job: Any) -> None:
    """The same seed gives the same order, another seed another; none loses a document."""
    texts = [chr(97 + number) * 3 for number in range(20)]
    orders = [stream(packing(Texts(texts), attrs.evolve(job, seed=seed)), "train") for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert Counter(orders[0]) == Counter(orders[2])


def test_held_out_rows_are_the_same_for_every_seed(job: Any) -> None:
    """Runs with different seeds are measured on the same rows, in the order of the corpus."""
    texts = Texts(train=[], held_out=["abc", "def", "ghi"])
    for seed in range(5):
        assert stream(packing(texts, attrs.evolve(job, seed=seed)), "validation") == [
            *b"bc",
            256,
            *b"ef",
            256,
            *b"hi",
            256,
        ]


@attrs.frozen
class Wide:
    """A tokenizer with as many ids as asked for, whose texts are written as ids."""

    vocab_size: int
    eos_id: int = 0

    def encode(self, text: str) -> np.ndarray:
        return np.array([int(word) for word in text.split()], np.int32)


@pytest.mark.parametrize("vocabulary", [65_536, 65_537, 200_000])
def test_highest_id_survives(job: Any, vocabulary: int) -> None:
    """The last id of a vocabulary comes back, on either side of what two bytes hold."""
    rows = packing(Texts([f"1 {vocabulary - 1} 2"]), job, Wide(vocabulary))
    assert rows.batch("train", [0]).tokens.tolist() == [[1, vocabulary - 1, 2, 0]]


def test_rows_travel_without_what_made_them(job: Any) -> None:
    """A table in another process gives the same rows and carries neither corpus nor tokenizer."""
    rows = packing(Texts(["abcdef", "gh"]), job)
    copy = pickle.loads(ForkingPickler.dumps(rows))
    assert copy.corpus is copy.tokenizer is copy.job is None
    assert copy.count("train") == rows.count("train")
    assert torch.equal(copy.batch("train", [1]).targets, rows.batch("train", [1]).targets)


def test_closing_lets_go_of_the_tokens(job: Any) -> None:
    """A closed table has no rows any more, and can be opened again."""
    rows = packing(Texts(["abcdef"]), job)
    rows.close()
    with pytest.raises(KeyError):
        rows.count("train")
    rows.open()
    assert rows.count("train") == 2


def test_rows_of_one_token_are_refused(job: Any) -> None:
    """With a length of 1 there would be rows without a target."""
    with pytest.raises(ValueError, match="nothing to predict"):
        Packing(corpus=Texts([]), tokenizer=Bytes(), job=job, length=1)


def _went_on(job: Any, then: Texts, now: Texts, *, accept: bool) -> Packing:
    rows = packing(now, job)
    rows.recipe = ResolvedRecipe("", "", accept_changes=accept)
    rows.load_state_dict(json.loads(json.dumps(packing(then, job).state_dict())))
    return rows


def test_the_same_corpus_goes_on(job: Any) -> None:
    """However its documents lie in files: what counts are the tokens."""
    _went_on(job, Texts(["abc", "", "defg"], ["h"]), Texts(["abc", "defg"], ["h"]), accept=False)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (Texts(["abcd", "efgh", "ijkl"], ["h"]), "train had 3 rows, and has 4"),
        (Texts(["abcd", "efgX"], ["h"]), "train had other tokens in its 3 rows"),
        (Texts(["abc", "defgh"], ["h"]), "train had other tokens in its 3 rows"),
        (Texts(["abcd", "efgX"], []), "train had other tokens in its 3 rows, and validation had 1 rows, and has 0"),
    ],
)
def test_another_corpus_is_refused_unless_accepted(
    job: Any, caplog: pytest.LogCaptureFixture, now: Texts, words: str
) -> None:
    """More documents, another letter, another place where one begins: told by split, as a mistake or as a warning."""
    then = Texts(["abcd", "efgh"], ["h"])
    with pytest.raises(UserError, match=words) as caught:
        _went_on(job, then, now, accept=False)
    assert caught.value.exit_code == 2 and "--accept-changes" in str(caught.value)
    _went_on(job, then, now, accept=True)
    assert words in caplog.text
