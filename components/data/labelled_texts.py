"""Texts and conversations with a label, for a classifier."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from drawloom import component, setting
from drawloom.components.data.chat.corpus import ChatCorpus
from drawloom.components.data.chat.encode import Encoded, encode_conversation
from drawloom.components.data.chat.template import ChatTemplate
from drawloom.ports import ChatTokenizer, complete_document

FORMS = '{"text": ..., "label": ...}, or messages in place of the text'


@component(needs={"jinja2": "drawloom[chat]"})
class LabelledTexts(ChatCorpus):
    """
    Labelled texts in JSON-lines, Parquet and Arrow files.

    A line has a `text`, encoded with an end token, or `messages`, rendered by the chat template, and a `label` from
    `labels`. A document's weight, 1, is at its last token, where a classifier reads its hidden state: a document cut
    into several rows is judged by the last one.
    """

    kind: ClassVar[str] = "text"

    labels: list[str] = setting(
        "names of the classes",
        check=lambda labels: None if len(labels) == len(set(labels)) > 1 else "write two or more different labels",
    )

    def encode_row(self, row: Mapping[str, Any], template: ChatTemplate) -> Sequence[Encoded]:
        """Return a line's document, weighted at its last token, with its label's number. Raises ValueError."""
        label = row.get("label")
        if label not in self.labels:
            raise ValueError(f"its label is {label!r}; write one of {', '.join(map(repr, self.labels))}, as in {FORMS}")
        ids = encode_text_or_messages(self.tokenizer, row, template)
        weights = np.zeros(len(ids), np.float32)
        weights[-1:] = 1.0
        return [Encoded(ids, weights, label=float(self.labels.index(label)))]

    def format_nothing_trained_error(self) -> str:
        return f"no line has a text; write {FORMS}"


def encode_text_or_messages(tokenizer: ChatTokenizer, row: Mapping[str, Any], template: ChatTemplate) -> np.ndarray:
    """Return the ids of a line's text or messages, int32 (tokens,). Raises ValueError for a malformed line."""
    text, messages = row.get("text"), row.get("messages")
    if isinstance(text, str):
        return complete_document(tokenizer, tokenizer.encode(text))
    if isinstance(messages, list):
        return encode_conversation(tokenizer, template, messages, [0.0] * len(messages), row.get("tools")).ids
    raise ValueError(f"it has {', '.join(row) or 'no keys'}; write {FORMS}")
