"""Tokenizing documents in batches."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from drawloom.components.data.bytes import Bytes
from drawloom.components.data.hugging_face_tokenizer import HuggingFaceTokenizer
from drawloom.components.data.sources.documents import Document
from drawloom.components.data.store import tokenizing
from drawloom.components.data.store.processes import make_unopened_copy
from drawloom.components.data.store.tokenizing import (
    batch_documents_by_characters,
    split_text_for_encoding,
    tokenize_part_into_shard,
)
from drawloom.graph import UserError
from support.stores import Texts, store_of

TEXT = "".join(f"def function_{number}(x):\n    return x * {number}\n\n\n" for number in range(400))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    """Return a byte-pair tokenizer for merging white space."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<end>"], initial_alphabet=alphabet)
    made.train_from_iterator([TEXT], trainer)
    made.save(str(path))
    opened = HuggingFaceTokenizer(path=path, end_token="<end>")
    opened.open()
    return opened


def test_batches_are_counted_in_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch has at most so many characters; a longer document is alone, and none is lost."""
    monkeypatch.setattr(tokenizing, "BATCH", 10)
    documents = [Document("x" * size, "", 0) for size in (4, 5, 2, 30, 1, 0, 9)]
    batch_lengths = [
        [len(document.text) for document in batch] for batch in batch_documents_by_characters(iter(documents))
    ]
    assert batch_lengths == [[4, 5], [2], [30], [1, 0, 9]]


@pytest.mark.parametrize("text", [TEXT, TEXT.replace("\n", " "), "x" * 9_000, "", "\n" * 5_000])
def test_pieces_have_the_ids_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, tokenizer: HuggingFaceTokenizer, text: str
) -> None:
    """A long text, cut into pieces, has the ids of the whole text, with and without lines and spaces."""
    monkeypatch.setattr(tokenizing, "BATCH", 1_000)
    text_pieces = split_text_for_encoding(text, tokenizer.encode)
    assert "".join(text_pieces) == text
    whole = tokenizer.encode(text)
    assert np.array_equal(np.concatenate([tokenizer.encode(piece) for piece in text_pieces]), whole)
    assert text != TEXT or max(map(len, text_pieces)) <= 1_000


def test_a_long_document_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document of several batches is stored as one."""
    monkeypatch.setattr(tokenizing, "BATCH", 100)
    store = store_of(tmp_path / "store", [["a", TEXT, "b"]])
    assert store.lengths.tolist() == [2, len(TEXT) + 1, 2]
    assert bytes(store.read(1, 0, len(TEXT)).ids.tolist()).decode() == TEXT


def test_documents_that_cannot_be_tokenized_are_named(tmp_path: Path) -> None:
    """A tokenizer's error gets the documents' source and offset."""
    with pytest.raises(UserError, match=r"memory:0 to memory:1: can't be tokenized: .*surrogate"):
        tokenize_part_into_shard(tmp_path, 0, Texts(("fine", "\ud800")), Bytes(), lambda read, tokens: None)


def test_another_process_opens_its_own_tokenizer(tokenizer: HuggingFaceTokenizer) -> None:
    """A tokenizer arrives closed in another process, and gives the same ids once it is opened."""
    fresh = make_unopened_copy(tokenizer)
    assert isinstance(fresh, HuggingFaceTokenizer) and "_tokenizer" not in vars(fresh)
    fresh.open()
    assert fresh.encode("x <end>").tolist() == tokenizer.encode("x <end>").tolist()
