"""Base class for conversation corpora: files, the chat template, splits, and the summary in the log."""

import datetime
import logging
from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from drawloom import UserError, internal, setting
from drawloom.components.data.chat.encode import Encoded
from drawloom.components.data.chat.template import ChatTemplate, RenderError, create_chat_template
from drawloom.components.data.chat.turns import EarlierTurnError, find_turn_end_ids
from drawloom.components.data.sources.documents import EncodedCorpus, choose_split, file_globs, validation_fraction
from drawloom.components.data.sources.formats import Line, read_json_lines_or_table_rows
from drawloom.components.data.store.store import choose_id_dtype
from drawloom.components.data.token_arrays import TokenArrays
from drawloom.graph import component_base_class
from drawloom.ports import ChatTokenizer, Split, find_end_ids

log = logging.getLogger("drawloom.data")


@component_base_class
class ChatCorpus(EncodedCorpus):
    """Base for corpora from file lines: a chat template renders a line into documents, with a loss weight per token."""

    kind: ClassVar[str] = "conversation"
    label: ClassVar[str] = "label"
    earlier_turn_remedy: ClassVar[str] = "write one line for each answer, with the earlier turns in its prompt"

    tokenizer: ChatTokenizer
    paths: list[str] = file_globs("JSON-lines, .parquet and .arrow files")
    template: Path | None = setting("file with a jinja2 chat template; default: the tokenizer's template", default=None)
    date: datetime.date | None = setting(
        "date for templates with today's date, such as 2025-01-31; without it they fail", default=None
    )
    validation_fraction: float = validation_fraction("lines")
    _straddling: int = internal(0)
    _untrained: int = internal(0)
    _answer_end_ids: frozenset[int] = internal(frozenset())

    @abstractmethod
    def encode_row(self, row: Mapping[str, Any], template: ChatTemplate) -> Sequence[Encoded]:
        """
        Encode a line's documents, trained or not. Raises ValueError for a bad line.
        """

    @abstractmethod
    def format_nothing_trained_error(self) -> str:
        """Return the error message for a corpus without a trained token."""

    def insert_mismatched_answers(self, documents: list[Encoded], split: Split) -> list[Encoded]:
        """Return a split's documents, given its lines' documents: unchanged here, while subclasses may add some."""
        return documents

    def select_ids_that_decide_split(self, row: Mapping[str, Any], documents: Sequence[Encoded]) -> np.ndarray:
        """Return the ids that a line shares only with lines in its split (ids,): here all ids of its documents."""
        return np.concatenate([document.ids for document in documents])

    def check_before_open(self) -> None:
        """
        Encode the first line. Raises UserError for a glob without a file, a malformed line, or a missing
        template.
        """
        with closing(self.encode_trained_documents_by_line()) as lines:
            next(lines, None)

    def open(self) -> None:
        """Render, tokenize and split all lines. Raises UserError with file and line number for a bad line."""
        self._untrained = self._straddling = 0
        self._answer_end_ids = frozenset()
        rows: dict[Split, list[Encoded]] = {"train": [], "validation": []}
        for line, kept in self.encode_trained_documents_by_line():
            self._untrained += not kept
            if kept:
                ids = self.select_ids_that_decide_split(line.row, kept)
                rows[choose_split(ids.astype(np.int64).tobytes(), self.validation_fraction)] += kept
        if not any(rows.values()):
            raise UserError(f"paths: {self.format_nothing_trained_error()}")
        splits = {
            split: self._join_documents(self.insert_mismatched_answers(documents, split), split)
            for split, documents in rows.items()
        }
        self._splits = {**splits}
        self._log_summary(sum(map(len, rows.values())), splits.values())

    def encode_trained_documents_by_line(self) -> Generator[tuple[Line, list[Encoded]]]:
        """Yield every line with its encoded documents, leaving out documents without a trained token."""
        # The template starts its process at the first rendering: lines of plain text need none.
        template = create_chat_template(self.tokenizer, self.template, self.date)
        try:
            for line in read_json_lines_or_table_rows(self.paths):
                yield (
                    line,
                    [row for row in self._encode_line_and_count_straddling(line, template) if row.weights[1:].any()],
                )
            if template.has_rendered:
                self._answer_end_ids = find_end_ids(self.tokenizer) | find_turn_end_ids(self.tokenizer, template)
        finally:
            template.close()

    @property
    def answer_end_ids(self) -> frozenset[int]:
        return self._answer_end_ids

    def list_input_files(self) -> dict[str, list[Path]]:
        """Return the template file, if there is one."""
        return {} if self.template is None else {"template": [self.template]}

    def _encode_line_and_count_straddling(self, line: Line, template: ChatTemplate) -> Sequence[Encoded]:
        """Encode a line, and count its straddling documents. Raises UserError with the line's position."""
        try:
            encoded = self.encode_row(line.row, template)
        except (ValueError, RecursionError) as error:
            prefix = "the template refuses it: " if isinstance(error, RenderError) else ""
            remedy = f"; {self.earlier_turn_remedy}" if isinstance(error, EarlierTurnError) else ""
            raise UserError(f"{line.position}: {prefix}{error}{remedy}") from error
        self._straddling += sum(document.straddles for document in encoded)
        return encoded

    def _join_documents(self, rows: Sequence[Encoded], split: Split) -> TokenArrays:
        """Concatenate a split's documents. Raises UserError if only some have a reference, or a label."""
        dtype = choose_id_dtype(self.vocab_size)
        weights = [row.weights for row in rows]
        references = [row.reference for row in rows if row.reference is not None]
        labels = [row.label for row in rows if row.label is not None]
        if len(references) not in (0, len(rows)):
            text = f"{len(references)} of {len(rows)} {self.kind}s have a reference"
            raise UserError(f"paths: {text}; write one in every line, or in none")
        if len(labels) not in (0, len(rows)):
            text = f"{len(labels)} of {len(rows)} {self.kind}s have a {self.label}"
            raise UserError(f"paths: {text}; write one in every line, or in none")
        name = f"{split} {self.kind}"
        return TokenArrays.concatenate(
            (row.ids for row in rows), dtype, weights, references or None, labels or None, name
        )

    def _log_summary(self, rows: int, splits: Iterable[TokenArrays]) -> None:
        """Log the counts for documents, tokens, dropped lines, and straddling documents."""
        tokens = sum(len(split.ids) for split in splits)
        trained = sum(int((split.own_weights > 0).sum()) for split in splits if split.own_weights is not None)
        log.info("%d %ss of %d tokens, of which %d are trained", rows, self.kind, tokens, trained)
        if self._untrained:
            log.warning("%d lines have no token to train, and are dropped", self._untrained)
        if self._straddling:
            log.info(
                "%d %ss have other ids than their text has as a whole: it is tokenized anew where a turn begins, as it "
                "is when a model answers",
                self._straddling,
                self.kind,
            )
