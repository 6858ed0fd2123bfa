"""
Ports of corpora: documents of text, tokenizers, and documents of token ids.

This module imports no torch, so that processes that only tokenize stay small.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from drawloom.graph import port

Split = Literal["train", "validation"]


@port
class Corpus(Protocol):
    """Documents in a stable order, divided into a training split and a validation split."""

    def documents(self, split: Split) -> Iterator[str]:
        """Yield the texts of a split."""
        ...


@port
class Tokenizer(Protocol):
    """A converter between text and token ids."""

    @property
    def vocab_size(self) -> int:
        """
        The number of token ids, known before `open`, because rows and models that open first check their ids against
        it.
        """
        ...

    @property
    def eos_id(self) -> int:
        """The id that ends a document."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int32 (tokens,), without `eos_id`."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32 (tokens,), equal to the results of `encode`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 are replaced."""
        ...

    def token_bytes(self) -> np.ndarray:
        """
        Return the number of UTF-8 bytes of each id, int64 (vocab_size,); 0 for `eos_id` and other ids without text.

        The bytes of a text's ids add up to the bytes of the text.
        """
        ...

    def save(self, folder: Path) -> None:
        """
        Write the files from which other programs make the same ids: `tokenizer.json` and its configuration.

        If the folder has a model's `config.json`, transformers chooses the tokenizer's class by it.
        """
        ...


@port
@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer with control tokens, which separate the messages of a conversation in a chat template."""

    @property
    def chat_template(self) -> str | None:
        """The tokenizer's own template, in jinja2; None if it has no template."""
        ...

    @property
    def template_tokens(self) -> Mapping[str, str]:
        """The tokens that templates use by name, such as bos_token."""
        ...

    @property
    def control_tokens(self) -> Sequence[str]:
        """The texts of all control tokens."""
        ...

    def encode_control(self, text: str) -> np.ndarray:
        """
        Return the ids of a text with written-out control tokens, int32 (tokens,); `encode` reads them as plain text.
        """
        ...

    def decode_control(self, ids: Sequence[int]) -> str:
        """Return the text of ids with control tokens written out; `decode` omits them."""
        ...


class DocumentPart(NamedTuple):
    """
    Consecutive tokens of a document: `ids`, of any integer dtype (tokens,).

    `weights`, non-negative float32 (tokens,), is the weight of each token as a target; None: 1 each. `reference` is
    another model's log-probability of all trained tokens of the document, if the data have it.
    """

    ids: np.ndarray
    weights: np.ndarray | None = None
    reference: float | None = None


class TokenDocuments(Protocol):
    """
    Documents of token ids, with random access by number from 0; picklable for worker processes.

    A complete document ends with its end token; a truncated one may not.
    """

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each document, any integer dtype (documents,)."""
        ...

    @property
    def fingerprint(self) -> str:
        """A digest of all ids, weights and references in their order."""
        ...

    def read(self, document: int, first: int, last: int) -> DocumentPart:
        """Return the tokens of a document from `first` to before `last`, or to the end of the document."""
        ...

    def source(self, document: int) -> str:
        """Return the origin of a document for messages: a file and a position in it."""
        ...


@port
class TokenCorpus(Protocol):
    """Documents of token ids in a stable order, divided into a training split and a validation split."""

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary; every id is below it."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that fills the rest of a row."""
        ...

    def documents(self, split: Split) -> TokenDocuments:
        """Return the documents of a split."""
        ...


@runtime_checkable
class KnownDocuments(Protocol):
    """A corpus that estimates the length of its documents before it is opened."""

    def mean_length(self) -> float | None:
        """Return the mean number of tokens of a document; None if the data are not on this machine."""
        ...
