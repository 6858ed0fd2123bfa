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
    """Documents in a stable order, each of which belongs to the training or the validation split."""

    def documents(self, split: Split) -> Iterator[str]:
        """The texts of a split."""
        ...


@port
class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids, known before `open`: rows and models that open first compare their ids with it."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that ends a document."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, int32 of shape (tokens,), without `eos_id`."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, int32 (tokens,), as `encode` gives them."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are not UTF-8 are replaced."""
        ...

    def token_bytes(self) -> np.ndarray:
        """
        How many bytes of UTF-8 each id stands for, int64 (vocab_size,); 0 for `eos_id` and others that are no text.

        The bytes of a text's ids add up to those of the text.
        """
        ...

    def save(self, folder: Path) -> None:
        """
        Write the files that other programs need for the same ids: `tokenizer.json` and its configuration.

        If the folder has a model's `config.json`, transformers chooses a class by it.
        """
        ...


@port
@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer with control tokens, between which a chat template writes conversations."""

    @property
    def chat_template(self) -> str | None:
        """The tokenizer's own template, in jinja2; None if it has none."""
        ...

    @property
    def template_tokens(self) -> Mapping[str, str]:
        """The tokens that templates know by a name, such as bos_token."""
        ...

    @property
    def control_tokens(self) -> Sequence[str]:
        """The texts of all control tokens."""
        ...

    def encode_control(self, text: str) -> np.ndarray:
        """The ids of a text in which control tokens are written out, int32 (tokens,); `encode` takes them as text."""
        ...

    def decode_control(self, ids: Sequence[int]) -> str:
        """The text of ids, with control tokens written out; `decode` leaves them out."""
        ...


class DocumentPart(NamedTuple):
    """
    Some tokens of a document, one after another: `ids`, of any integer dtype (tokens,).

    `weights`, float32 of 0 and more (tokens,), is what each weighs as a target; None: 1 each. `reference` is the
    log-probability of all trained tokens of the document by another model, where the data have it.
    """

    ids: np.ndarray
    weights: np.ndarray | None = None
    reference: float | None = None


class TokenDocuments(Protocol):
    """
    Documents of token ids, with random access by number from 0. It can be pickled, for worker processes.

    A document that ends has its end token; one that was cut off may have none.
    """

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each document, any integer dtype (documents,)."""
        ...

    @property
    def fingerprint(self) -> str:
        """A digest of all ids, weights and references in their order; it differs if any of them does."""
        ...

    def read(self, document: int, first: int, last: int) -> DocumentPart:
        """The tokens of a document from `first` to before `last`, or to its end."""
        ...

    def source(self, document: int) -> str:
        """Where a document comes from, for people: a file, and a position in it."""
        ...


@port
class TokenCorpus(Protocol):
    """Documents of token ids in a stable order, each of which belongs to the training or the validation split."""

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that fills the rest of a row."""
        ...

    def documents(self, split: Split) -> TokenDocuments:
        """The documents of a split."""
        ...


@runtime_checkable
class KnownDocuments(Protocol):
    """A corpus that knows how long its documents are before it is opened."""

    def mean_length(self) -> float | None:
        """The tokens of a document in mean; None if the data are not here."""
        ...
