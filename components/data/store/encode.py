"""Tokenization into shards, in batches measured in characters, to bound memory."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np

from drawloom.components.data.sources.documents import Document, Part
from drawloom.components.data.store.shard import ShardWriter, choose_id_dtype
from drawloom.components.ports.corpus import Tokenizer, complete_document
from drawloom.graph import UserError

BATCH = 2**18  # characters; longer documents are cut into pieces of about this size
MARGIN = 256  # characters on either side of a cut, which must have the same ids with and without it
MAX_TRIES = 64  # candidate cuts per kind of separator

Report = Callable[[int, int], None]
"""Receives the numbers of characters and tokens of a written batch."""


def tokenize_part_into_shard(folder: Path, number: int, part: Part, tokenizer: Tokenizer, report: Report) -> None:
    """Tokenize a part into a shard; empty documents are dropped."""
    with ShardWriter(folder, number, np.dtype(choose_id_dtype(tokenizer.vocab_size)), weighted=False) as shard:
        for batch in batch_documents_by_characters(part.documents()):
            before = shard.tokens
            for document, ids in zip(batch, _encode_batch(batch, tokenizer), strict=True):
                if len(ids):
                    shard.append_document(complete_document(tokenizer, ids), document.source, document.offset)
            report(sum(len(document.text) for document in batch), shard.tokens - before)


def batch_documents_by_characters(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group documents into batches with `BATCH` characters; a longer document is its own batch."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        if batch and size + len(document.text) > BATCH:
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += len(document.text)
    if batch:
        yield batch


def split_text_for_encoding(text: str, encode: Callable[[str], np.ndarray]) -> list[str]:
    """
    Cut a long text into pieces, so that the pieces' ids in succession are the whole text's; `encode` returns ids
    (tokens,).

    Cuts are after line ends, or else at spaces, where the surrounding characters have the same ids with and without the
    cut.
    """
    parts = []
    while len(text) > BATCH:
        cut = next((cut for cut in _iterate_cut_candidates(text) if _keeps_ids_if_cut(text, cut, encode)), len(text))
        parts.append(text[:cut])
        text = text[cut:]
    return [*parts, text]


def _iterate_cut_candidates(text: str) -> Iterator[int]:
    """Yield candidate ends for a piece, between half of `BATCH` and `BATCH` characters from the start."""
    for separator, shift in (("\n", 1), (" ", 0)):
        cut = BATCH
        for _ in range(MAX_TRIES):
            cut = text.rfind(separator, BATCH // 2, cut)
            if cut < 0:
                break
            yield cut + shift
    yield from range(BATCH, BATCH - MAX_TRIES, -1)


def _keeps_ids_if_cut(text: str, cut: int, encode: Callable[[str], np.ndarray]) -> bool:
    """Return whether encoding both sides of a cut separately gives the same ids as encoding them together."""
    left, right = text[max(cut - MARGIN, 0) : cut], text[cut : cut + MARGIN]
    return np.array_equal(encode(left + right), np.concatenate([encode(left), encode(right)]))


def _encode_batch(batch: Sequence[Document], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Tokenize a batch's documents. Raises UserError with the batch's first and last position."""
    try:
        if len(batch) == 1 and len(batch[0].text) > BATCH:
            return [
                np.concatenate(
                    [tokenizer.encode(piece) for piece in split_text_for_encoding(batch[0].text, tokenizer.encode)]
                )
            ]
        return tokenizer.encode_batch([document.text for document in batch])
    except UserError as error:
        first, last = batch[0], batch[-1]
        where = f"{first.source}:{first.offset} to {last.source}:{last.offset}"
        raise UserError(f"{where}: can't be tokenized: {error}") from error


def make_unopened_copy(tokenizer: Tokenizer) -> Tokenizer:
    """
    Return an unopened copy of a tokenizer for another process, because some open tokenizers can't be pickled, or lose
    settings.
    """
    fresh: Tokenizer = attrs.evolve(tokenizer) if attrs.has(type(tokenizer)) else tokenizer  # type: ignore[misc]
    return fresh
