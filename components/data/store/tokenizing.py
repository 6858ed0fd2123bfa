"""Tokenize a part of a corpus into a shard, with its progress."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np

from drawloom import UserError, internal
from drawloom.components.data.sources.documents import Document, Part
from drawloom.components.data.store.store import ShardWriter, choose_id_dtype
from drawloom.components.storage.byte_size import format_decimal_byte_size
from drawloom.ports import Tokenizer, complete_document

BATCH = 2**18  # characters; longer documents are cut into pieces of about this size
MARGIN = 256  # characters on either side of a cut, which must have the same ids with and without it
MAX_TRIES = 64  # candidate cuts per kind of separator

Report = Callable[[int, int], None]
"""Receives a written batch's counts: characters and tokens."""


def tokenize_part_into_shard(folder: Path, number: int, part: Part, tokenizer: Tokenizer, report: Report) -> None:
    """Tokenize a part into a shard; empty documents are dropped."""
    with ShardWriter(folder, number, np.dtype(choose_id_dtype(tokenizer.vocab_size))) as shard:
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


@attrs.define
class Progress:
    """
    Progress counter, with a report every `interval` seconds.

    sizes: bytes by part number, for incomplete parts; `complete`: bytes in parts complete at the start.
    """

    sizes: Mapping[int, int]
    complete: int
    say: Callable[[str], None]
    interval: float
    clock: Callable[[], float] = time.monotonic
    _read: dict[int, int] = internal(factory=dict)
    _tokens: int = internal(0)
    _started: float = internal()
    _last_shown: float = internal()

    def __attrs_post_init__(self) -> None:
        self._started = self._last_shown = self.clock()

    def add_batch(self, part: int, characters: int, tokens: int) -> None:
        """Add a batch to a part's progress; characters count as bytes, up to the part's size."""
        self._read[part] = min(self._read.get(part, 0) + characters, self.sizes[part])
        self._tokens += tokens
        self.report_if_due()

    def finish_part(self, part: int) -> None:
        """Count a whole part as read, whatever its batches counted."""
        self._read[part] = self.sizes[part]

    def report_if_due(self) -> None:
        """Report the progress if `interval` seconds have passed since the last report."""
        if self.clock() - self._last_shown >= self.interval:
            self._last_shown = self.clock()
            self.say(str(self))

    def __str__(self) -> str:
        read, total = sum(self._read.values()), sum(self.sizes.values())
        seconds = max(self.clock() - self._started, 1e-9)
        percent = 100 * (self.complete + read) / max(self.complete + total, 1)
        rate = f"{self._tokens / seconds / 1e6:.2f} M tokens/s"
        left = f", {format_duration((total - read) * seconds / read)} left" if read else ""
        done, whole = (format_decimal_byte_size(self.complete + size) for size in (read, total))
        return f"tokenized {done} of {whole} ({percent:.0f} %), {rate}{left}"


def format_duration(seconds: float) -> str:
    """Format a time span in seconds, minutes, or hours and minutes."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
