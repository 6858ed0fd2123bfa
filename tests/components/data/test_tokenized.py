"""Documents of a token store."""

from pathlib import Path
from typing import Any

import pytest

from drawloom.components.data.bytes import Bytes
from drawloom.components.data.store.build import build_store
from drawloom.components.data.tokenized import Tokenized
from drawloom.graph import UserError
from support.stores import Texts, store_of


def test_a_store_is_a_corpus(drawloom_opened: Any, tmp_path: Path) -> None:
    """A store has the vocabulary of its tokenizer, and its documents in two splits."""
    store_of(tmp_path / "store", [[f"text {number}" for number in range(50)]])
    corpus = drawloom_opened(Tokenized(path=tmp_path / "store", validation_fraction=0.3))
    counts = [len(corpus.documents(split).lengths) for split in ("train", "validation")]
    assert sum(counts) == 50 and min(counts) > 5
    assert (corpus.vocab_size, corpus.eos_id) == (257, 256)


def test_a_store_has_document_lengths(tmp_path: Path) -> None:
    """Lengths include the end token and are known before opening; they are None for a missing or empty store."""
    store_of(tmp_path / "store", [["four", "sixsix"]])
    store_of(tmp_path / "empty", [[]])
    lengths = [Tokenized(path=tmp_path / name).compute_mean_document_length() for name in ("store", "empty", "other")]
    assert lengths == [6, None, None]


def test_the_validation_split_may_have_a_store(drawloom_opened: Any, tmp_path: Path) -> None:
    """With a store for validation nothing of the other is held out; both have one tokenizer."""
    store_of(tmp_path / "one", [["a", "b"]])
    store_of(tmp_path / "two", [["c"]])
    corpus = drawloom_opened(Tokenized(path=tmp_path / "one", validation_path=tmp_path / "two"))
    assert [len(corpus.documents(split).lengths) for split in ("train", "validation")] == [2, 1]


def test_a_store_with_another_beginning_is_refused(tmp_path: Path) -> None:
    """A store's documents begin and end as its tokenizer says, and a run whose tokenizer says otherwise is refused."""

    class Begun(Bytes):
        prefix_ids = (7,)

    class Ended(Begun):
        eos_id = 3

    build_store(tmp_path / "store", [Texts(("a", "", "bc"))], Begun())
    corpus = Tokenized(path=tmp_path / "store", tokenizer=Begun(), validation_fraction=0.0)
    corpus.open()
    documents = [corpus.documents("train").read(number, 0, 9).ids.tolist() for number in (0, 1)]
    assert documents == [[7, 97, 256], [7, 98, 99, 256]]
    for tokenizer, ids in ((Bytes(), r"\[256\]"), (Ended(), r"\[7, 3\]")):
        with pytest.raises(UserError, match=rf"the begin and end ids \[7, 256\], and the run's tokenizer {ids}"):
            Tokenized(path=tmp_path / "store", tokenizer=tokenizer).check_before_open()


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Two stores of different tokenizers are an error."""

    class Other(Bytes):
        eos_id = 0

    store_of(tmp_path / "one", [["a"]])
    build_store(tmp_path / "two", [Texts(("a",))], Other())
    with pytest.raises(UserError, match="two has another tokenizer than"):
        Tokenized(path=tmp_path / "one", validation_path=tmp_path / "two").open()
