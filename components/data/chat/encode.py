"""Rendered conversations as token ids, with the weight of each token as a target."""

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import attrs
import numpy as np

from drawloom.components.data.chat.turns import Message, Rendered
from drawloom.components.ports.corpus import ChatTokenizer


@attrs.frozen
class Encoded:
    """
    ids: int32 (tokens,); weights: float32 (tokens,), of each as a target.

    `straddles` says whether the text encoded at once has other ids: a token would then belong to two parts.
    `reference` is the log-probability of the trained tokens by another model, if the data have it.
    """

    ids: np.ndarray
    weights: np.ndarray
    straddles: bool = False
    reference: float | None = None


def encode_rendered(tokenizer: ChatTokenizer, rendered: Rendered, messages: Sequence[Message], tools: Any) -> Encoded:
    """
    The ids of a conversation; what comes before a trained part is encoded apart from it, as it is when a model answers.

    Control tokens are the template's alone: one that is spelled out in a content is encoded as text. Raises ValueError
    if one is spelled out where the template's text and the user's can't be told apart.
    """
    control = re.compile("|".join(map(re.escape, tokenizer.control_tokens)) or "(?!)")
    forged = _forged(control, rendered, messages, tools)
    cuts = {0, len(rendered.text)}
    cuts |= {place for span in rendered.trained for place in (span.first, span.last)}
    cuts |= {place for span in forged for place in span}
    places = sorted(cuts)
    ids, weights = [np.empty(0, np.int32)], [np.empty(0, np.float32)]
    for first, last in pairwise(places):
        text = rendered.text[first:last]
        is_content = any(begin <= first and last <= end for begin, end in forged)
        part = tokenizer.encode(text) if is_content else tokenizer.encode_control(text)
        weight = next((each.weight for each in rendered.trained if each.first <= first and last <= each.last), 0.0)
        ids.append(part)
        weights.append(np.full(len(part), weight, np.float32))
    joined = np.concatenate(ids)
    at_once = joined if forged else tokenizer.encode_control(rendered.text)
    return Encoded(joined, np.concatenate(weights), not np.array_equal(at_once, joined))


def _forged(
    control: re.Pattern[str], rendered: Rendered, messages: Sequence[Message], tools: Any
) -> list[tuple[int, int]]:
    """The contents in which a control token is written out."""
    forged = []
    for number, message in enumerate(messages):
        content = message.get("content")
        rest = {key: value for key, value in message.items() if key != "content" or not isinstance(content, str)}
        if found := control.search(json.dumps(rest, ensure_ascii=False)):
            where = "outside of its content"
            raise ValueError(f"turn {number + 1} contains the control token {found[0]} {where}; remove it there")
        if isinstance(content, str) and (found := control.search(content)):
            if number not in rendered.contents:
                where = "where the template changes the content, so that it can't be told from the template's own"
                raise ValueError(f"turn {number + 1} contains the control token {found[0]} {where}; remove it there")
            forged.append(rendered.contents[number])
    if found := control.search(json.dumps(tools, ensure_ascii=False)):
        raise ValueError(f"a tool contains the control token {found[0]}; remove it there")
    return forged


def encode_completion(tokenizer: ChatTokenizer, prompt: str, completion: str) -> Encoded:
    """A prompt and its completion, both plain text, and the end token; the last two are trained."""
    before, after = tokenizer.encode(prompt), tokenizer.encode(completion)
    ids = np.concatenate([before, after, np.array([tokenizer.eos_id], np.int32)])
    weights = np.concatenate([np.zeros(len(before), np.float32), np.ones(len(after) + 1, np.float32)])
    return Encoded(ids, weights, not np.array_equal(tokenizer.encode(prompt + completion), ids[:-1]))
