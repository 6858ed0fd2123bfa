"""Order, splits, workers and the check of a resumed run, common to all packings."""

import json
import logging
import pickle
from collections import Counter
from multiprocessing.reduction import ForkingPickler
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from drawloom.components.data.packing.concatenated import Concatenated
from drawloom.components.data.token_arrays import TokenArrays
from drawloom.components.ports.corpus import Split
from drawloom.components.ports.data import IGNORE_INDEX
from drawloom.components.ports.model import LanguageModel
from drawloom.graph import Every, ResolvedRecipe, UserError
from drawloom.graph.testing import fake


@attrs.frozen
class Texts:
    """Texts in memory, as bytes; each ends with the end."""

    train: list[str]
    validation: list[str] = attrs.field(factory=list)
    vocab_size: int = 257
    eos_id: int = 256

    def documents(self, split: Split) -> TokenArrays:
        texts = self.train if split == "train" else self.validation
        return TokenArrays.concatenate([np.array([*text.encode(), 256]) for text in texts], np.uint16)


def packing(corpus: Texts, job: Any, length: int = 4) -> Concatenated:
    rows = Concatenated(tokens=corpus, job=job, length=length)
    rows.open()
    return rows


def stream(rows: Concatenated, split: Split) -> list[int]:
    """All targets of a split, in order."""
    targets = rows.batch(split, range(rows.count_rows(split))).targets
    return targets[targets != IGNORE_INDEX].tolist()


def test_documents_without_a_target_are_dropped(job: Any) -> None:
    """A document of one token, such as its end, has nothing to predict, and is in no row."""
    rows = packing(Texts(train=["", "abc", ""]), job)
    assert rows.batch("train", [0]).tokens.tolist() == [[*b"abc", 256]]
    assert rows.batch("train", [0]).targets.tolist() == [[*b"bc", 256, IGNORE_INDEX]]


class Chats(Texts):
    """The same with weights of tokens, as conversations have."""

    def documents(self, split: Split) -> TokenArrays:
        texts = [np.array([*text.encode(), 256]) for text in (self.train if split == "train" else self.validation)]
        return TokenArrays.concatenate(texts, np.uint16, [np.ones(len(text), np.float32) for text in texts])


def test_cut_conversations_are_counted(job: Any, caplog: pytest.LogCaptureFixture) -> None:
    """
    Conversations longer than a row are counted, with the longest; texts may be cut, and pairs are dropped instead.
    """
    texts = ["abc", "abcdefg", "abcde"]
    packing(Texts(train=texts), job)
    packing(Chats(train=["abc"]), job)
    assert not caplog.messages
    packing(Chats(train=texts), job)
    [message] = caplog.messages
    assert message.startswith("train: 2 of 3 documents with weights are longer than a row of 4 tokens, and are cut")
    assert message.endswith("the longest has 8 tokens")


def test_the_last_row_is_padded(job: Any) -> None:
    """The end token without targets fills the last row, and lowers the fill rate."""
    rows = packing(Texts(train=["abcde"]), job)
    assert rows.batch("train", [1]).tokens.tolist() == [[*b"e", 256, 256, 256]]
    assert rows.batch("train", [1]).weights.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert rows.fill_rate("train") == 6 / 8
    assert rows.fill_rate("validation") == 1.0


def test_splits_are_packed_separately(job: Any) -> None:
    """No row mixes documents of two splits, and a split without documents has no rows."""
    rows = packing(Texts(train=["abcdefgh"], validation=[]), job)
    assert rows.count_rows("train") == 2
    assert rows.count_rows("validation") == 0
    assert packing(Texts(train=[], validation=["abcdefgh"]), job).count_rows("train") == 0


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


def test_pickled_rows_have_no_corpus(job: Any) -> None:
    """A pickled dataset has the same rows, without the corpus and the run."""
    rows = packing(Texts(["abcdef", "gh"]), job)
    copy = pickle.loads(ForkingPickler.dumps(rows))
    assert copy.tokens is copy.job is None
    assert copy.count_rows("train") == rows.count_rows("train")
    assert torch.equal(copy.batch("train", [1]).targets, rows.batch("train", [1]).targets)


def test_closing_frees_the_index(job: Any) -> None:
    """A closed dataset has no rows, and can be opened again."""
    rows = packing(Texts(["abcdef"]), job)
    rows.close()
    with pytest.raises(KeyError):
        rows.count_rows("train")
    rows.open()
    assert rows.count_rows("train") == 2


def test_rows_of_one_token_are_refused(job: Any) -> None:
    """With a length of 1 there would be rows without a target."""
    with pytest.raises(ValueError, match="nothing to predict"):
        Concatenated(tokens=Texts([]), job=job, length=1)


def _went_on(job: Any, then: Texts, now: Texts, *, accept: bool) -> Concatenated:
    rows = packing(now, job)
    rows.recipe = ResolvedRecipe("", "", accept_changes=accept)
    rows.load_state_dict(json.loads(json.dumps(packing(then, job).state_dict())))
    return rows


def test_the_same_tokens_resume(job: Any) -> None:
    """The same documents resume, with the rows they had."""
    corpus = Texts(["abc", "defg"], ["h"])
    rows, before = _went_on(job, corpus, Texts(["abc", "defg"], ["h"]), accept=False), packing(corpus, job)
    assert rows.state_dict() == before.state_dict()
    every = range(before.count_rows("train"))
    assert rows.batch("train", every).tokens.tolist() == before.batch("train", every).tokens.tolist()


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


@pytest.mark.parametrize(
    ("length", "longest", "tokens"), [(8, 6, 7), (8, 7, None), (4, 6, None), (4, 3, 4), (8, None, None)]
)
def test_texts_longer_than_the_models_positions_are_warned_of(
    length: int, longest: int | None, tokens: int | None, job: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A text as a row has it, whose positions begin anew: long rows of short texts are no mistake."""
    model = fake(LanguageModel, vocab_size=257, max_sequence_length=longest)
    rows = Concatenated(
        tokens=Texts(train=["ab", "abcdef", "c"]), job=job, length=length, models=Every({"model": model})
    )
    with caplog.at_level(logging.WARNING):
        rows.open()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (tokens is not None)
    if tokens is not None:
        assert f"has {tokens} tokens, and the positions of [model] are made for {longest}" in messages[0]
        assert f"write a length of at most {longest}" in messages[0]
