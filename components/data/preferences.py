"""Preference corpus: pairs with a chosen and a rejected answer to the same prompt."""

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, ClassVar

import attrs
import numpy as np

from drawloom.components.data.chat.corpus import ChatCorpus
from drawloom.components.data.chat.encode import Encoded, encode_conversation, encode_prompt_and_completion
from drawloom.components.data.chat.messages import Message, check_messages
from drawloom.components.data.chat.template import ChatTemplate
from drawloom.graph import component

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
        prompt, chosen, rejected = row.get("prompt"), row.get("chosen"), row.get("rejected")
        if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
            return _make_weighted_pair_or_drop_it(
                [encode_prompt_and_completion(self.tokenizer, prompt, answer) for answer in (chosen, rejected)], row
            )
        if not (isinstance(chosen, list) and isinstance(rejected, list) and isinstance(prompt, list | None)):
            raise ValueError(f"it has {', '.join(row) or 'no keys'}; write {FORMS}")
        sides = [[*(prompt or []), *answer] for answer in (chosen, rejected)]
        shared = len(prompt) if prompt else len([*takewhile(_are_messages_equal, zip(*sides, strict=False))])
        tools = row.get("tools")
        return _make_weighted_pair_or_drop_it(
            [self._encode_conversation(side, shared, tools, template) for side in sides], row
        )

    def select_ids_that_decide_split(self, row: Mapping[str, Any], documents: Sequence[Encoded]) -> np.ndarray:
        return select_prompt_ids(row, documents)

    def format_nothing_trained_error(self) -> str:
        return f"no line has two different answers to compare; write {FORMS}"

    def _encode_conversation(
        self, messages: Sequence[Message], prompt_turns: int, tools: Any, template: ChatTemplate
    ) -> Encoded:
        """Encode a conversation, with trained assistant turns after the prompt."""
        check_messages(messages)
        weights = [float(index >= prompt_turns and turn["role"] == "assistant") for index, turn in enumerate(messages)]
        return encode_conversation(self.tokenizer, template, messages, weights, tools)


def select_prompt_ids(row: Mapping[str, Any], documents: Sequence[Encoded]) -> np.ndarray:
    """Return the ids before the first document's answer (ids,), or without a prompt all documents' ids."""
    if row.get("prompt") == "":
        return np.concatenate([document.ids for document in documents])
    return documents[0].ids[: find_answer_start(documents[0])]


def find_answer_start(document: Encoded) -> int:
    """Return the index of the first trained token, at least 1, because nothing predicts the first token."""
    return 1 + int(np.argmax(document.weights[1:] > 0))


def _are_messages_equal(pair: tuple[Message, Message]) -> bool:
    return pair[0] == pair[1]


def _make_weighted_pair_or_drop_it(sides: Sequence[Encoded], row: Mapping[str, Any]) -> list[Encoded]:
    """
    Return both sides with equal weights for trained tokens, 1 in sum, and with references and margin.

    Returns an empty list if a side has no trained token, or both sides are equal. Raises ValueError for malformed
    values.
    """
    references = [_read_reference_logp(row, key) for key in REFERENCES]
    if (references[0] is None) != (references[1] is None):
        raise ValueError(f"it has only one of {' and '.join(REFERENCES)}; write both or none")
    targets = [np.append(False, side.weights[1:] > 0) for side in sides]  # nothing predicts the first token
    if not all(is_target.any() for is_target in targets) or np.array_equal(sides[0].ids, sides[1].ids):
        return []
    weight = np.float32(1 / sum(int(is_target.sum()) for is_target in targets))
    labels = [None, None] if (margin := _read_margin(row)) is None else [margin, 0.0]
    return [
        attrs.evolve(side, weights=weight * is_target, reference=reference, label=label)
        for side, is_target, reference, label in zip(sides, targets, references, labels, strict=True)
    ]


def _read_margin(row: Mapping[str, Any]) -> float | None:
    """Return a line's margin, or None. Raises ValueError unless it is a finite number."""
    value = row.get(MARGIN)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{MARGIN} is {value!r}; write a finite number")
    return float(value)


def _read_reference_logp(row: Mapping[str, Any], key: str) -> float | None:
    """Return a line's log-probability under `key`, or None. Raises ValueError unless it is a number up to 0."""
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value <= 0:
        raise ValueError(f"{key} is {value!r}; write the logarithm of a probability, a number of at most 0")
    return float(value)
