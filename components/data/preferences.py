"""A corpus of preferences: pairs of answers to the same prompt, of which one is preferred to the other."""

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, ClassVar

import attrs
import numpy as np

from drawloom.components.data.chat.corpus import ChatCorpus, check_messages
from drawloom.components.data.chat.encode import Encoded, encode_completion, encode_rendered
from drawloom.components.data.chat.template import ChatTemplate
from drawloom.components.data.chat.turns import Message, render_turns
from drawloom.graph import component

REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")
"""Keys of a line, as TRL's: the log-probabilities of both answers by a reference, each a sum over its tokens."""

FORMS = '{"prompt": ..., "chosen": ..., "rejected": ...}, three texts or three lists of messages'


@component(needs={"jinja2": "drawloom[chat]"})
class Preferences(ChatCorpus):
    """
    Pairs of answers in JSON-lines, Parquet and Arrow files: document 2n is preferred to document 2n + 1.

    A line has a `prompt`, `chosen` and `rejected`, all text or all messages, and as needed `tools`; without a prompt it
    is the messages with which both conversations begin. The assistant's turns after the prompt are compared, each up to
    its end token. The weights of a pair's tokens add up to 1. A line of which one side has nothing to compare, or both
    are the same, is dropped, with a warning. A line may have `ref_chosen_logps` and `ref_rejected_logps`, what a
    reference makes of the answers, as `drawloom reference-logps` writes them.
    """

    pairs: ClassVar[bool] = True
    kind: ClassVar[str] = "answer"

    def encoded(self, row: Mapping[str, Any], template: ChatTemplate) -> Sequence[Encoded]:
        """Both documents of a line, the preferred one first, or none. Raises ValueError for a line of another form."""
        prompt, chosen, rejected = row.get("prompt"), row.get("chosen"), row.get("rejected")
        if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
            return _pair([encode_completion(self.tokenizer, prompt, each) for each in (chosen, rejected)], row)
        if not (isinstance(chosen, list) and isinstance(rejected, list) and isinstance(prompt, list | None)):
            raise ValueError(f"it has {', '.join(row) or 'no keys'}; write {FORMS}")
        sides = [[*(prompt or []), *each] for each in (chosen, rejected)]
        shared = len(prompt) if prompt else len([*takewhile(_same, zip(*sides, strict=False))])
        tools = row.get("tools")
        return _pair([self._answer(side, shared, tools, template) for side in sides], row)

    def nothing_trained(self) -> str:
        """No line has two answers."""
        return f"no line has two different answers to compare; write {FORMS}"

    def _answer(self, messages: Sequence[Message], shared: int, tools: Any, template: ChatTemplate) -> Encoded:
        """A conversation of which the assistant's turns after the prompt's are trained."""
        check_messages(messages)
        weights = [float(number >= shared and each["role"] == "assistant") for number, each in enumerate(messages)]
        return encode_rendered(self.tokenizer, render_turns(template, messages, weights, tools), messages, tools)


def _same(pair: tuple[Message, Message]) -> bool:
    return pair[0] == pair[1]


def _pair(sides: Sequence[Encoded], row: Mapping[str, Any]) -> list[Encoded]:
    """Both sides with weights that add up to 1, and references; nothing if there is nothing to compare."""
    references = [_reference(row, key) for key in REFERENCES]
    if (references[0] is None) != (references[1] is None):
        raise ValueError(f"it has only one of {' and '.join(REFERENCES)}; write both or none")
    targets = [np.append(False, side.weights[1:] > 0) for side in sides]  # the first token is no target
    if not all(each.any() for each in targets) or np.array_equal(sides[0].ids, sides[1].ids):
        return []
    weight = np.float32(1 / sum(int(each.sum()) for each in targets))
    return [
        attrs.evolve(side, weights=weight * each, reference=reference)
        for side, each, reference in zip(sides, targets, references, strict=True)
    ]


def _reference(row: Mapping[str, Any], key: str) -> float | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value <= 0:
        raise ValueError(f"{key} is {value!r}; write the logarithm of a probability, a number of at most 0")
    return float(value)
