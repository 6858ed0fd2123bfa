"""Tokenizes the documents of a part into a shard, in batches that are counted in characters: they bound memory."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np

from drawloom.components.data.sources.documents import Document, Part
from drawloom.components.data.store.shard import ShardWriter, id_dtype
from drawloom.components.ports.corpus import Tokenizer
from drawloom.graph import UserError

BATCH = 2**18  # characters; a longer document is cut into pieces of about this size
AROUND = 256  # characters on either side of a cut that must be encoded alike with and without it
TRIES = 64  # places to cut that are tried

Report = Callable[[int, int], None]
"""Takes the characters and tokens of a batch that was written."""


def write_shard(folder: Path, number: int, part: Part, tokenizer: Tokenizer, report: Report) -> None:
    """Tokenize a part into a shard; each document gets the end token, and empty ones are dropped."""
    end = np.array([tokenizer.eos_id], np.int64)
    with ShardWriter(folder, number, np.dtype(id_dtype(tokenizer.vocab_size)), weighted=False) as shard:
        for batch in batches(part.documents()):
            before = shard.tokens
            for document, ids in zip(batch, _encode(batch, tokenizer), strict=True):
                if len(ids):
                    shard.add(np.concatenate([ids, end]), document.source, document.offset)
            report(sum(len(document.text) for document in batch), shard.tokens - before)


def batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents of `BATCH` characters together; a longer one is a batch of its own."""
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


def pieces(text: str, encode: Callable[[str], np.ndarray]) -> list[str]:
    """
    A long text in pieces that have, encoded one by one, the ids of the whole text; `encode` gives ids (tokens,).

    It is cut after line ends, or else at spaces, where the characters around are encoded alike whole and in two.
    """
    found = []
    while len(text) > BATCH:
        place = next((place for place in _places(text) if _can_be_cut(text, place, encode)), len(text))
        found.append(text[:place])
        text = text[place:]
    return [*found, text]


def _places(text: str) -> Iterator[int]:
    """Where a piece could end, at most `BATCH` and at least half of it from the start."""
    for separator, after in (("\n", 1), (" ", 0)):
        place = BATCH
        for _ in range(TRIES):
            place = text.rfind(separator, BATCH // 2, place)
            if place < 0:
                break
            yield place + after
    yield from range(BATCH, BATCH - TRIES, -1)


def _can_be_cut(text: str, place: int, encode: Callable[[str], np.ndarray]) -> bool:
    left, right = text[max(place - AROUND, 0) : place], text[place : place + AROUND]
    return np.array_equal(encode(left + right), np.concatenate([encode(left), encode(right)]))


def _encode(batch: Sequence[Document], tokenizer: Tokenizer) -> list[np.ndarray]:
    try:
        if len(batch) == 1 and len(batch[0].text) > BATCH:
            return [np.concatenate([tokenizer.encode(piece) for piece in pieces(batch[0].text, tokenizer.encode)])]
        return tokenizer.encode_batch([document.text for document in batch])
    except UserError as error:
        first, last = batch[0], batch[-1]
        where = f"{first.source}:{first.offset} to {last.source}:{last.offset}"
        raise UserError(f"{where}: can't be tokenized: {error}") from error


def unopened(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer for another process, which opens it: once open some can't be pickled, and others lose settings."""
    fresh: Tokenizer = attrs.evolve(tokenizer) if attrs.has(type(tokenizer)) else tokenizer  # type: ignore[misc]
    return fresh
