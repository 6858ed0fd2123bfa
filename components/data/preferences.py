"""Preference corpus: pairs with a chosen and a rejected answer to the same prompt."""

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, ClassVar

import attrs
import numpy as np

from drawloom import component
from drawloom.components.data.chat.corpus import ChatCorpus
from drawloom.components.data.chat.encode import Encoded, encode_prompt_with_answers
from drawloom.components.data.chat.template import ChatTemplate

MARGIN = "margin"
"""Key of a line: how much better the chosen answer is, which the reward of a model is to exceed (`loss.reward`)."""

REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")
"""Keys of a line, as in TRL: log-probabilities of both answers under a reference model, summed over tokens."""

FORMS = '{"prompt": ..., "chosen": ..., "rejected": ...}, three texts or three lists of messages'


@component(needs={"jinja2": "drawloom[chat]"})
class Preferences(ChatCorpus):
    """
    Answer pairs in JSON-lines, Parquet and Arrow files: document 2n is preferred to document 2n + 1.

    A line has a `prompt`, `chosen` and `rejected`, all text or all messages, and optionally `tools`; without a
    `prompt`, both conversations' common first messages are the prompt. The loss compares the assistant's turns after
    the prompt, up to their end tokens. The token weights in a pair sum to 1. A line is dropped,
    with a warning, if one side has nothing to compare or both sides are equal. A line may have `ref_chosen_logps`
    and `ref_rejected_logps`, a reference model's log-probabilities, which `drawloom reference-logps` writes, and a
    `margin` for `loss.reward`.
    """

    pairs: ClassVar[bool] = True
    kind: ClassVar[str] = "answer"
    label: ClassVar[str] = MARGIN

    def encode_row(self, row: Mapping[str, Any], template: ChatTemplate) -> Sequence[Encoded]:
        """Return a line's two documents, the preferred one first, or none. Raises ValueError for a malformed line."""
        prompt = row.get("prompt")
        answers: Any = [row.get("chosen"), row.get("rejected")]
        if prompt in (None, []) and all(isinstance(answer, list) for answer in answers):
            shared = len([*takewhile(lambda pair: pair[0] == pair[1], zip(*answers, strict=False))])
            prompt, answers = answers[0][:shared], [answer[shared:] for answer in answers]
        sides = encode_prompt_with_answers(self.tokenizer, template, row, prompt, answers, FORMS)
        return _make_weighted_pair(sides, row)

    def select_ids_that_decide_split(self, row: Mapping[str, Any], documents: Sequence[Encoded]) -> np.ndarray:
        return select_prompt_ids(row, documents)

    def format_nothing_trained_error(self) -> str:
        return f"no line has two different answers to compare; write {FORMS}"


def select_prompt_ids(row: Mapping[str, Any], documents: Sequence[Encoded]) -> np.ndarray:
    """Return the ids before the first document's answer (ids,), or without a prompt all documents' ids."""
    if row.get("prompt") == "":
        return np.concatenate([document.ids for document in documents])
    return documents[0].ids[: find_answer_start(documents[0])]


def find_answer_start(document: Encoded) -> int:
    """Return the index of the first trained token, at least 1, because nothing predicts the first token."""
    return 1 + int(np.argmax(document.weights[1:] > 0))


def _make_weighted_pair(sides: Sequence[Encoded], row: Mapping[str, Any]) -> list[Encoded]:
    """
    Return both sides with equal weights for trained tokens, 1 in sum, and with references and margin.

    Returns an empty list if a side has no trained token, or both sides are equal. Raises ValueError for malformed
    values.
    """
    references = [
        _read_number(row, key, 0, "the logarithm of a probability, a number of at most 0") for key in REFERENCES
    ]
    if (references[0] is None) != (references[1] is None):
        raise ValueError(f"it has only one of {' and '.join(REFERENCES)}; write both or none")
    if not all((side.weights[1:] > 0).any() for side in sides) or np.array_equal(sides[0].ids, sides[1].ids):
        return []
    margin = _read_number(row, MARGIN, math.inf, "a finite number")
    labels = [None, None] if margin is None else [margin, 0.0]
    return [
        attrs.evolve(side, reference=reference, label=label)
        for side, reference, label in zip(spread_weight_over_tokens(*sides), references, labels, strict=True)
    ]


def spread_weight_over_tokens(*sides: Encoded) -> list[Encoded]:
    """Return the documents with equal weights for all trained tokens; the weights sum to 1 over all documents."""
    targets = [np.append(False, side.weights[1:] > 0) for side in sides]  # nothing predicts the first token
    weight = np.float32(1 / sum(int(is_target.sum()) for is_target in targets))
    return [attrs.evolve(side, weights=weight * is_target) for side, is_target in zip(sides, targets, strict=True)]


def _read_number(row: Mapping[str, Any], key: str, maximum: float, valid: str) -> float | None:
    """Return a line's number under `key`, or None. Raises ValueError unless it is finite, and at most `maximum`."""
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value > maximum:
        raise ValueError(f"{key} is {value!r}; write {valid}")
    return float(value)
