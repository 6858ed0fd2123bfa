"""Packing documents into rows."""

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
    validation: list[str] = attrs.field(factory=list)

    def documents(self, split: Split) -> Iterator[str]:
        return iter(self.train if split == "train" else self.validation)


def packing(corpus: Texts, job: Any, tokenizer: Any = None, length: int = 4) -> Packing:
    rows = Packing(corpus=corpus, tokenizer=tokenizer or Bytes(), job=job, length=length)
    rows.open()
    return rows


def stream(rows: Packing, split: Split) -> list[int]:
    """All targets of a split, in order."""
    targets = rows.batch(split, range(rows.count(split))).targets
    return targets[targets != IGNORE_INDEX].tolist()


def test_documents_end_with_the_end(job: Any) -> None:
    """Each document is followed by the end, which is a target; an empty document is dropped."""
    rows = packing(Texts(train=["", "abc", ""]), job)
    assert rows.batch("train", [0]).tokens.tolist() == [[*b"abc", 256]]
    assert rows.batch("train", [0]).targets.tolist() == [[*b"bc", 256, IGNORE_INDEX]]


def test_splits_are_packed_separately(job: Any) -> None:
    """No row mixes documents of two splits, and a split without documents has no rows."""
    rows = packing(Texts(train=["abcdefgh"], validation=[]), job)
    assert rows.count("train") == 2
    assert rows.count("validation") == 0
    assert packing(Texts(train=[], validation=["abcdefgh"]), job).count("train") == 0


def test_training_documents_are_shuffled_by_the_seed(job: Any) -> None:
    """Equal seeds give equal orders, different seeds different ones; no document is lost."""
    texts = [chr(97 + number) * 3 for number in range(20)]
    orders = [stream(packing(Texts(texts), attrs.evolve(job, seed=seed)), "train") for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert Counter(orders[0]) == Counter(orders[2])


def test_validation_rows_are_the_same_for_every_seed(job: Any) -> None:
    """Runs with different seeds are evaluated on the same rows, in the order of the corpus."""
    texts = Texts(train=[], validation=["abc", "def", "ghi"])
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
    """A tokenizer with any number of ids, whose texts are written as ids."""

    vocab_size: int
    eos_id: int = 0

    def encode(self, text: str) -> np.ndarray:
        return np.array([int(word) for word in text.split()], np.int32)


@pytest.mark.parametrize("vocabulary", [65_536, 65_537, 200_000])
def test_the_highest_id_survives(job: Any, vocabulary: int) -> None:
    """The last id of a vocabulary is kept, on either side of what two bytes hold."""
    rows = packing(Texts([f"1 {vocabulary - 1} 2"]), job, Wide(vocabulary))
    assert rows.batch("train", [0]).tokens.tolist() == [[1, vocabulary - 1, 2, 0]]


def test_pickled_rows_have_neither_corpus_nor_tokenizer(job: Any) -> None:
    """A pickled dataset has the same rows, without corpus and tokenizer."""
    rows = packing(Texts(["abcdef", "gh"]), job)
    copy = pickle.loads(ForkingPickler.dumps(rows))
    assert copy.corpus is copy.tokenizer is copy.job is None
    assert copy.count("train") == rows.count("train")
    assert torch.equal(copy.batch("train", [1]).targets, rows.batch("train", [1]).targets)


def test_closing_frees_the_tokens(job: Any) -> None:
    """A closed dataset has no rows, and can be opened again."""
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


def test_the_same_tokens_resume(job: Any) -> None:
    """The same tokens in other files resume."""
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
def test_a_changed_corpus_is_refused_unless_accepted(
    job: Any, caplog: pytest.LogCaptureFixture, now: Texts, words: str
) -> None:
    """More documents, another letter, another document start: reported by split, as an error or a warning."""
    then = Texts(["abcd", "efgh"], ["h"])
    with pytest.raises(UserError, match=words) as caught:
        _went_on(job, then, now, accept=False)
    assert caught.value.exit_code == 2 and "--accept-changes" in str(caught.value)
    _went_on(job, then, now, accept=True)
    assert words in caplog.text
