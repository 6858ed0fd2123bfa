"""Answers judged good or bad by themselves, for KTO."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

from drawloom import UserError, component
from drawloom.components.data.chat.corpus import ChatCorpus
from drawloom.components.data.chat.encode import Encoded, encode_prompt_with_answers
from drawloom.components.data.chat.template import ChatTemplate
from drawloom.components.data.preferences import (
    find_answer_start,
    select_prompt_ids,
    spread_weight_over_tokens,
)
from drawloom.ports import ChatTokenizer, Split

FORMS = '{"prompt": ..., "completion": ..., "label": true}, with two texts or two lists of messages'


@component(needs={"jinja2": "drawloom[chat]"})
class Feedback(ChatCorpus):
    """
    Judged answers in JSON-lines, Parquet and Arrow files, in pairs for KTO.

    A line has a `prompt` and a `completion`, both text or both messages, and a `label`: true for a good answer, false
    for a bad one. Document 2n is such an answer, and document 2n + 1 its prompt with the answer of the next line in the
    split (the last with the first), from which KTO estimates a divergence. The token weights of both sum to 1. A line
    without a trained token is dropped, with a warning.
    """

    pairs: ClassVar[bool] = True
    unpaired: ClassVar[bool] = True
    kind: ClassVar[str] = "answer"

    def encode_row(self, row: Mapping[str, Any], template: ChatTemplate) -> Sequence[Encoded]:
        """Return a line's document, with label 1 or -1. Raises ValueError for a malformed line."""
        if not isinstance(label := row.get("label"), bool):
            raise ValueError(f"its label is {label!r}; write {FORMS}")
        return [attrs.evolve(encode_prompt_completion_row(self.tokenizer, row, template), label=1.0 if label else -1.0)]

    def select_ids_that_decide_split(self, row: Mapping[str, Any], documents: Sequence[Encoded]) -> np.ndarray:
        return select_prompt_ids(row, documents)

    def format_nothing_trained_error(self) -> str:
        return f"no line has an answer; write {FORMS}"

    def insert_mismatched_answers(self, documents: list[Encoded], split: Split) -> list[Encoded]:
        """
        Insert after every document its prompt with the next document's answer. Raises UserError for a split with one
        line.
        """
        if len(documents) == 1:
            text = f"the {split} split has one answer, but KTO compares a line's answer with another line's"
            raise UserError(f"paths: {text}; write more lines, or another validation_fraction")
        others = documents[1:] + documents[:1]
        return [
            part
            for one, other in zip(documents, others, strict=True)
            for part in spread_weight_over_tokens(one, _replace_answer(one, other))
        ]


def encode_prompt_completion_row(tokenizer: ChatTokenizer, row: Mapping[str, Any], template: ChatTemplate) -> Encoded:
    """Encode a line's prompt and completion, with the completion trained. Raises ValueError for a malformed line."""
    forms = "a prompt and a completion, two texts or two lists of messages"
    return encode_prompt_with_answers(tokenizer, template, row, row.get("prompt"), [row.get("completion")], forms)[0]


def _replace_answer(document: Encoded, answer_document: Encoded) -> Encoded:
    """Return one document's prompt with another's answer."""
    first, second = find_answer_start(document), find_answer_start(answer_document)
    ids = np.concatenate([document.ids[:first], answer_document.ids[second:]])
    return Encoded(ids, np.concatenate([document.weights[:first], answer_document.weights[second:]]), label=0.0)
