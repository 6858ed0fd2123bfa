"""
Ports for corpora: text documents, tokenizers, and token documents.

This module does not import torch, to keep processes for tokenization small.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from drawloom import port

Split = Literal["train", "validation"]


@port
class Corpus(Protocol):
    """Documents in a stable order, divided into a training split and a validation split."""

    def documents(self, split: Split) -> Iterator[str]:
        """Yield a split's texts."""


@port
class Tokenizer(Protocol):
    """A converter between text and token ids."""

    @property
    def vocab_size(self) -> int:
        """
        The number of token ids, known before `open`, because rows and models that open first check ids against
        it.
        """

    @property
    def eos_id(self) -> int:
        """End-of-document token id."""

    @property
    def prefix_ids(self) -> Sequence[int]:
        """Ids before a document's or prompt's text, such as a BOS token; often none."""

    @property
    def suffix_ids(self) -> Sequence[int]:
        """Ids between a document's text and its `eos_id`; rarely any."""

    def encode(self, text: str) -> np.ndarray:
        """Encode a text as ids, int32 (tokens,), without `prefix_ids`, `suffix_ids` and `eos_id`."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode texts, with the same result for a text as `encode`, int32 (tokens,)."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids as text; bytes that are not UTF-8 are replaced."""

    def token_byte_counts(self) -> np.ndarray:
        """
        Return UTF-8 byte counts by id, int64 (vocab_size,); 0 for `eos_id` and other ids without text.

        The byte counts over a text's ids add up to the text's byte count.
        """

    def save(self, folder: Path) -> None:
        """
        Write `tokenizer.json` and its configuration, from which other programs make the same ids.

        If the folder has a model's `config.json`, transformers chooses the tokenizer's class by it.
        """


@runtime_checkable
class SeveralEnds(Protocol):
    """A tokenizer with all ids at which its model ends a text."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids at the end of a text, `eos_id` among them."""


def find_end_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids at the end of a text: the tokenizer's `end_ids`, or its `eos_id`."""
    return tokenizer.end_ids if isinstance(tokenizer, SeveralEnds) else frozenset({tokenizer.eos_id})


def complete_prompt(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """
    Return a prompt, int32 (tokens,), from the ids to continue: `prefix_ids` and these.

    A prompt without a token would begin like a document after another one: it is `eos_id`.
    """
    prompt = np.concatenate([np.array(tokenizer.prefix_ids, np.int32), ids])
    return prompt if len(prompt) else np.array([tokenizer.eos_id], np.int32)


def complete_document(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """Return a document, int32 (tokens,), from its text's ids: `prefix_ids`, the text, `suffix_ids` and `eos_id`."""
    end = [*tokenizer.suffix_ids, tokenizer.eos_id]
    return np.concatenate([np.array(tokenizer.prefix_ids, np.int32), ids, np.array(end, np.int32)])


@port
@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer with control tokens, which separate messages in a chat template."""

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The tokenizer's own templates, in jinja2, by name: `tool_use` is for requests with tools, else `default`."""

    @property
    def special_tokens_by_name(self) -> Mapping[str, str]:
        """The tokens that templates use by name, such as bos_token."""

    @property
    def control_tokens(self) -> Sequence[str]:
        """All control tokens as text."""

    def encode_with_control_tokens(self, text: str) -> np.ndarray:
        """
        Encode a text with written-out control tokens, int32 (tokens,); `encode` reads them as plain text.
        """

    def decode_with_control_tokens(self, ids: Sequence[int]) -> str:
        """Decode ids as text with control tokens written out; `decode` omits them."""


@port
@runtime_checkable
class EndsAnswers(Protocol):
    """A reader of conversations with the ids at which an answer ends."""

    @property
    def answer_end_ids(self) -> frozenset[int]:
        """Ids to end an answer: a text's ends, and the chat template's; empty without conversations."""

    @property
    def template(self) -> Path | None:
        """File with the chat template; None for the tokenizer's."""


@port
class ChatPrompts(Protocol):
    """An encoder from conversations to prompts for an answer."""

    @property
    def answer_end_ids(self) -> frozenset[int]:
        """Ids to end an answer."""

    def encode_messages_as_prompt(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """
        Encode messages, each with `role` and `content`, up to the next answer's beginning: int32 (tokens,).

        Raises UserError if there is no chat template, or if it rejects the messages.
        """

    def encode_message_after_answer(self, message: Mapping[str, Any]) -> np.ndarray:
        """
        Encode a message alone, from an answer's end token up to the next answer's beginning: int32 (tokens,).

        Raises UserError if there is no chat template, or if it rejects the message there.
        """

    def check_role_after_answer(self, role: str) -> None:
        """Raise UserError if no message with this role can follow an answer. Leaves nothing open."""
        ...


class DocumentPart(NamedTuple):
    """
    Consecutive tokens from a document: `ids`, any integer dtype (tokens,).

    `weights`, non-negative float32 (tokens,), weights tokens as targets; None means 1. `reference` is the document's
    log-probability under another model, over all trained tokens, and `label` a number for the loss, if the data have
    them.
    """

    ids: np.ndarray
    weights: np.ndarray | None = None
    reference: float | None = None
    label: float | None = None


class TokenDocuments(Protocol):
    """
    Token documents with random access by number from 0; picklable for worker processes.

    A complete document ends with its end token; a truncated one may not.
    """

    @property
    def lengths(self) -> np.ndarray:
        """Token counts by document, any integer dtype (documents,)."""

    @property
    def fingerprint(self) -> str:
        """Digest over all ids, weights and references in order."""

    def read(self, document: int, first: int, end: int) -> DocumentPart:
        """Return a document's tokens from `first` to before `end`, or to the document's end."""

    def describe_origin(self, document: int) -> str:
        """Return a document's origin for messages: a file and a position in it."""


@port
class TokenCorpus(Protocol):
    """Token documents in a stable order, divided into a training split and a validation split."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size; every id is below it."""

    @property
    def eos_id(self) -> int:
        """End-of-document token id, which also fills rows."""

    def documents(self, split: Split) -> TokenDocuments:
        """Return a split's documents."""


@runtime_checkable
class KnownDocuments(Protocol):
    """A corpus that estimates document lengths before it is opened."""

    def compute_mean_document_length(self) -> float | None:
        """Return the mean token count per document; None if the data are not on this machine."""
