"""What every tokenizer does."""

import tempfile
from pathlib import Path

import numpy as np

from drawloom.components.ports.data import Tokenizer
from drawloom.graph.testing import expect

TEXTS = ("", "a", "def f(x):\n\treturn x  # naïve\n", "Zwölf Boxkämpfer 😀", "one\r\ntwo\x00three", "  \n\n ")


def text_comes_back(tokenizer: Tokenizer) -> None:
    """What is encoded is decoded to the same text."""
    for text in TEXTS:
        back = tokenizer.decode([int(token) for token in tokenizer.encode(text)])
        expect(back == text, f"{text!r} comes back as {back!r}")


def ids_are_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    """Ids are int32, from 0 to below the size of the vocabulary; so is the end, which no text has."""
    expect(0 <= tokenizer.eos_id < tokenizer.vocab_size, f"the end {tokenizer.eos_id} is outside of the vocabulary")
    for text in TEXTS:
        ids = tokenizer.encode(text)
        expect(ids.dtype == np.int32 and ids.ndim == 1, f"ids are {ids.dtype} of shape {ids.shape}")
        expect(all(0 <= token < tokenizer.vocab_size for token in ids), f"{text!r} has ids outside of the vocabulary")
        expect(tokenizer.eos_id not in ids, f"{text!r} holds the end")


def two_agree(one: Tokenizer, other: Tokenizer) -> None:
    """Two that are made alike give the same ids."""
    for text in TEXTS:
        expect(np.array_equal(one.encode(text), other.encode(text)), f"{text!r} has two encodings")


def it_is_saved_for_others(tokenizer: Tokenizer) -> None:
    """Saving writes at least one file into a folder that is there."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        expect(any(Path(folder).iterdir()), "nothing was saved")
