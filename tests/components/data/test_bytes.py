"""The byte-level tokenizer."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from drawloom.components.data.bytes import Bytes
from drawloom.graph import UserError

texts = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files written by the tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    Bytes().save(folder)
    return folder


@given(texts)
def test_ids_are_bytes_and_decode_to_the_text(text: str) -> None:
    """The ids of a text are its UTF-8, as int32, and decoding them gives the text."""
    ids = Bytes().encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert Bytes().decode([*ids.tolist(), Bytes().eos_id]) == text


def test_each_byte_counts_once_and_the_end_not_at_all() -> None:
    """There are 257 ids, the last without text."""
    assert Bytes().token_byte_counts().tolist() == [1] * 256 + [0]


@given(texts)
@example("<|end|>")
@example(" \n\r\0\ufeff<0x00>Ġ")
def test_saved_tokenizer_gives_the_same_ids(tokenizer_folder: Path, text: str) -> None:
    """`tokenizers` encodes every text to the same ids with the saved file, even a text with the end token."""
    assert (
        Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")).encode(text).ids == Bytes().encode(text).tolist()
    )


@given(st.lists(st.integers(0, 255)))
def test_saved_tokenizer_decodes_equally(tokenizer_folder: Path, ids: list[int]) -> None:
    """Any bytes, UTF-8 or not, decode to the same text."""
    assert Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")).decode(ids) == Bytes().decode(ids)


def test_transformers_reads_the_saved_files(tokenizer_folder: Path) -> None:
    """`transformers` knows the end token, encodes its text as text, and skips the token when decoding."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert tokenizer.eos_token_id == Bytes().eos_id
    assert len(tokenizer) == Bytes().vocab_size
    text = "a <|end|> é , 'll ."
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode([*text.encode(), Bytes().eos_id], skip_special_tokens=True) == text


def test_unknown_ids_are_skipped() -> None:
    """A model with a larger vocabulary may produce ids unknown to the tokenizer."""
    assert Bytes().decode([65, 256, 300, 66]) == "AB"


def test_half_a_surrogate_pair_is_refused() -> None:
    """The UserError has the position of the bad character."""
    with pytest.raises(UserError, match="character 1"):
        Bytes().encode("a\ud800")
