"""Text for rows and statistics of packed data."""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from drawloom.components.data.mixture import list_document_sources
from drawloom.components.data.order.stream import convert_token_weights_to_shares, list_row_sources
from drawloom.components.ports.corpus import ChatTokenizer, Split, TokenDocuments, Tokenizer
from drawloom.components.ports.data import IGNORE_INDEX, PackedDataset, RowsOfTokens, TracedRows, require_token_batch
from drawloom.graph.cli.result import output, output_class
from drawloom.graph.cli.terminal import escape_control_characters

LENGTHS = "length: least, median, mean, most"
COLOURS = ("cyan", "yellow")
SPLITS: tuple[Split, ...] = ("train", "validation")
VISIBLE = {"\n": "⏎\n", "\t": "⇥"}


def format_statistics(rows: PackedDataset, copies: int | None) -> str:
    """
    Return a table with one line per split: rows, fill rate, documents, tokens, and document lengths.

    Mixtures add a line per source; training lines include the source's share of tokens and rows. The last line has the
    validation documents' number with copies in the training split, if known.
    """
    head = f"{'split':<12} {'rows':<11} {'fill rate':<11} {'documents':<11} {'tokens':<15} {LENGTHS:<33}"
    mixed = any(source.name for source in list_row_sources(rows))
    lines = [head + (" share of tokens, of rows" if mixed else "")]
    for split in SPLITS:
        lines.append(
            _format_rows_line(split, rows.count_rows(split), rows.fill_rate(split), _document_lengths(rows, split))
        )
        if mixed:
            lines += _format_source_lines(rows, split)
    if copies is not None:
        lines.append(f"{copies:,} validation documents are also in the training split")
    return "\n".join(line.rstrip() for line in lines)


@output_class
class SplitData:
    """Statistics of a split."""

    split: Split = output("split")
    rows: int = output("number of rows")
    fill_rate: float = output("fraction of a row's tokens that are not padding")
    documents: int | None = output("number of documents, if known")
    tokens: int | None = output("number of tokens, if known")
    copies: int | None = output("number of validation documents that are also in the training split, if counted")


@output_class
class RowData:
    """A row of packed tokens; weights, like targets, belong to the token before."""

    split: Split = output("split")
    row: int = output("index of the row")
    tokens: Sequence[int] = output("token ids")
    targets: Sequence[int] = output("target ids; -100 is not a target")
    weights: Sequence[float] = output("weights of the targets")
    document_ids: Sequence[int] = output("index of the document in the row, by token")
    sources: Sequence[str] = output("sources of the documents, if the data has them")


def count_validation_documents_in_training(rows: PackedDataset) -> int | None:
    """Count the validation documents whose ids a training document has, too; None if rows are not tokens."""
    if not isinstance(rows, RowsOfTokens):
        return None
    train, validation = (rows.tokens.documents(split) for split in SPLITS)
    candidates = np.flatnonzero(np.isin(train.lengths, validation.lengths)).tolist()
    trained = {_hash_document(train, number) for number in candidates}
    return sum(_hash_document(validation, number) in trained for number in range(len(validation.lengths)))


def _hash_document(documents: TokenDocuments, number: int) -> bytes:
    """Return a hash over a document's ids."""
    ids = documents.read(number, 0, int(documents.lengths[number])).ids
    return blake2b(ids.astype(np.uint32).data, digest_size=16).digest()


def summarize_splits(rows: PackedDataset, copies: int | None) -> list[SplitData]:
    """Return the statistics of all splits; `copies` counts the validation documents in the training split."""
    lengths = {split: _document_lengths(rows, split) for split in SPLITS}
    return [
        SplitData(
            split,
            rows.count_rows(split),
            rows.fill_rate(split),
            None if (known := lengths[split]) is None else len(known),
            None if known is None else int(known.sum(dtype=np.int64)),
            copies if split == "validation" else None,
        )
        for split in SPLITS
    ]


def read_row(rows: PackedDataset, split: Split, row: int) -> RowData:
    """Return a row as data."""
    batch = require_token_batch(rows.batch(split, [row]), "data show")
    tensors = (batch.tokens, batch.targets, batch.weights, batch.document_ids)
    tokens, targets, weights, ids = (tensor[0].tolist() for tensor in tensors)
    sources = list(rows.describe_row_origins(split, row)) if isinstance(rows, TracedRows) else []
    return RowData(
        split=split, row=row, tokens=tokens, targets=targets, weights=weights, document_ids=ids, sources=sources
    )


def _format_rows_line(name: str, rows: int, fill_rate: float, lengths: np.ndarray | None) -> str:
    """Return a line for a split or source: rows, fill rate in %, document count, tokens and document lengths."""
    start = f"{name:<12} {rows:<11,} {100 * fill_rate:<11.3f}"
    if lengths is None or not len(lengths):
        return start
    measures = f"{lengths.min()}, {np.median(lengths):.0f}, {lengths.mean():.1f}, {lengths.max()}"
    return f"{start} {len(lengths):<11,} {int(lengths.sum(dtype=np.int64)):<15,} {measures:<33}"


def _document_lengths(rows: PackedDataset, split: Split) -> np.ndarray | None:
    """Return the lengths of a split's documents, or None if rows are not tokens."""
    return rows.tokens.documents(split).lengths if isinstance(rows, RowsOfTokens) else None


def _format_source_lines(rows: Any, split: Split) -> Iterator[str]:
    """Yield a mixture's lines, one per source."""
    weights = sum(source.weight for source in rows.row_sources(split))
    shares = convert_token_weights_to_shares(rows.row_sources("train"))
    documents = list_document_sources(rows.tokens.documents(split))
    for source, own in zip(rows.row_sources(split), documents, strict=True):
        rate = source.tokens / (source.rows * rows.length) if source.rows else 1.0
        line = _format_rows_line(f"  {source.name}", source.rows, rate, own.documents.lengths)
        if split == "train":
            row_share = shares.get(source.name, 0) / sum(shares.values())
            line = f"{line:<97} {100 * source.weight / weights:.2f} %, {100 * row_share:.2f} %"
        yield line


def print_row(rows: PackedDataset, split: Split, row: int, tokenizer: Tokenizer | None) -> None:
    """
    Print a row: a line per document with its source, followed by its tokens.

    Tokens alternate between two colours, and tokens without target weight are dim. Without colours, `|` separates
    tokens, and ⟦ ⟧ enclose tokens with target weight. Without a tokenizer, tokens are numbers. Padding has one line.
    """
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    batch = require_token_batch(rows.batch(split, [row]), "data show")
    tokens, targets, weights, ids = (
        tensor[0].numpy() for tensor in (batch.tokens, batch.targets, batch.weights, batch.document_ids)
    )
    # the batch stores a target's weight at the token before the target
    own = np.concatenate([[0.0], weights[:-1]])
    console.print(f"{split} row {row}: {len(tokens)} tokens, {int((targets != IGNORE_INDEX).sum())} targets")
    sources = rows.describe_row_origins(split, row) if isinstance(rows, TracedRows) else []
    for number in range(int(ids.max()) + 1):
        indices = np.flatnonzero(ids == number)
        is_padding = bool(sources) and number >= len(sources)
        source = "padding" if is_padding else sources[number] if sources else f"document {number}"
        first, last = batch.positions[0][indices[0]], batch.positions[0][indices[-1]]
        console.print(
            f"[{indices[0]}:{indices[-1] + 1}] {escape_control_characters(source)}, positions {first} to {last}, "
            f"weights add up to {weights[indices].sum():g}",
            style="bold",
        )
        if is_padding:
            continue
        console.print(_colour_tokens(tokens[indices], own[indices], tokenizer, colours=console.is_terminal))


def _colour_tokens(tokens: np.ndarray, weights: np.ndarray, tokenizer: Tokenizer | None, *, colours: bool) -> Text:
    """Return tokens in alternating colours, or with separators and brackets if `colours` is false."""
    text, trained = Text(), False
    for number, (piece, weight) in enumerate(zip(_decode_pieces(tokens, tokenizer), weights.tolist(), strict=True)):
        if not colours:
            text.append("⟧" * (trained and not weight) + "|" * (number > 0) + "⟦" * (bool(weight) and not trained))
            trained = bool(weight)
        text.append(piece, style=f"{'' if weight else 'dim '}{COLOURS[number % 2]}")
    return text.append("⟧" * trained)


def _decode_pieces(tokens: np.ndarray, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield one text per token."""
    for token in tokens.tolist():
        if tokenizer is None:
            yield f" {token}"
        elif token == tokenizer.eos_id and not isinstance(tokenizer, ChatTokenizer):
            yield "<end>"
        else:
            # A tokenizer of chats writes control tokens out, which `decode` leaves away.
            decode = tokenizer.decode_with_control_tokens if isinstance(tokenizer, ChatTokenizer) else tokenizer.decode
            text = decode([token])
            yield escape_control_characters("".join(VISIBLE.get(letter, letter) for letter in text))
