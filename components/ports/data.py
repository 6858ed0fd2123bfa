"""Ports of data: corpus, tokenizer, packed rows and batches."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import attrs
import numpy as np
from torch import Tensor

from drawloom.graph import port

Split = Literal["train", "validation"]

IGNORE_INDEX = -100
"""The target of a token without a loss, as in torch's cross_entropy."""


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
        """The number of token ids."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that ends a document."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, int32 of shape (tokens,), without `eos_id`."""
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
        """Write the files that other programs need for the same ids: `tokenizer.json` and its configuration."""
        ...


@attrs.frozen
class Batch:
    """
    One microbatch of packed documents; every tensor has shape (rows, length), and is int64 unless it says otherwise.

    `targets` is the token after each, IGNORE_INDEX where there is none to learn. `positions` counts from 0 in each
    document. `document_ids` numbers the documents of a row: attention stays inside equal numbers. `weights`, float32 of
    0 and more, is the weight of each token's loss, 0 where there is no target. A data set makes it from whole rows, so
    that it does not depend on how a batch is cut into microbatches, or a row into parts.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    document_ids: Tensor
    weights: Tensor


@port
class PackedDataset(Protocol):
    """Rows of fixed length, with random access."""

    @property
    def length(self) -> int:
        """Tokens in a row."""
        ...

    def count(self, split: Split) -> int:
        """The number of rows of a split."""
        ...

    def batch(self, split: Split, indices: Sequence[int]) -> Batch:
        """The rows at these indices."""
        ...


@port
class TrainingData(Protocol):
    """This rank's microbatches, step after step."""

    def next_step(self) -> list[Batch]:
        """This data-parallel rank's microbatches of the next step."""
        ...


@port
class ValidationData(Protocol):
    """A fixed set of validation rows, always in the same order."""

    def batches(self) -> Iterator[Batch]:
        """This data-parallel rank's microbatches."""
        ...
