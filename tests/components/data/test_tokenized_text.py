"""Documents of text as token ids."""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from drawloom.components.data.bytes import Bytes
from drawloom.components.data.tokenized_text import TokenizedText
from drawloom.components.ports.corpus import Split


@attrs.frozen
class Texts:
    """A corpus in memory."""

    train: list[str]
    validation: list[str] = attrs.field(factory=list)

    def documents(self, split: Split) -> Iterator[str]:
        return iter(self.train if split == "train" else self.validation)


@attrs.frozen
class Wide(Bytes):
    """A tokenizer with any number of ids, whose texts are written as ids."""

    size: int
    eos_id: int = 0

    @property
    def vocab_size(self) -> int:
        return self.size

    def encode(self, text: str) -> np.ndarray:
        return np.array([int(word) for word in text.split()], np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]


def tokens_of(corpus: TokenizedText, split: Split) -> list[list[int]]:
    documents = corpus.documents(split)
    return [documents.tokens(number, 0, int(length)).tolist() for number, length in enumerate(documents.lengths)]


def test_documents_end_with_the_end(opened: Any) -> None:
    """Each document is followed by the end; empty ones are dropped, and splits are apart."""
    corpus = opened(TokenizedText(corpus=Texts(["", "abc", "", "d"], ["ef"]), tokenizer=Bytes()))
    assert tokens_of(corpus, "train") == [[*b"abc", 256], [*b"d", 256]]
    assert tokens_of(corpus, "validation") == [[*b"ef", 256]]
    assert (corpus.vocab_size, corpus.eos_id) == (257, 256)


@pytest.mark.parametrize("vocabulary", [65_536, 65_537, 200_000])
def test_the_highest_id_survives(opened: Any, vocabulary: int) -> None:
    """The last id of a vocabulary is kept, on either side of what two bytes hold."""
    corpus = opened(TokenizedText(corpus=Texts([f"1 {vocabulary - 1} 2"]), tokenizer=Wide(vocabulary)))
    assert tokens_of(corpus, "train") == [[1, vocabulary - 1, 2, 0]]
