"""
Which part of a rendered conversation belongs to a turn, found by rendering it turn by turn.

Templates don't say it. A turn's part is what follows the rendering of the turns before it with the generation prompt,
which is the text that a model is given to answer; the rendering up to it and that of the whole must begin with it.
Where there is content, it is also found by rendering the conversation with other content in its place, and must be
inside of that part. A template for which this does not hold renders a turn otherwise once others follow it (an empty
`<think>` in the last turn alone, say), so that there is no one text to train: it is refused and not guessed.
"""

import secrets
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs

from drawloom.components.data.chat.template import ChatTemplate

Message = Mapping[str, Any]

OFFER = 'write turns = "last" or turns = "one_row_per_turn"'


class AmbiguousTurn(ValueError):
    """A turn whose part of the rendering is not the same in the middle of a conversation as at its end."""


@attrs.frozen
class Span:
    """A part of a text, from `first` to before `last`, and the weight of its tokens as targets."""

    first: int
    last: int
    weight: float


@attrs.frozen
class Rendered:
    """
    A conversation's text, the parts to train, and the parts that are content, which no template wrote.

    `contents` are by the number of the message, from 0; a message is missing whose content can't be found.
    """

    text: str
    trained: tuple[Span, ...]
    contents: Mapping[int, tuple[int, int]]


def render_turns(
    template: ChatTemplate, messages: Sequence[Message], weights: Sequence[float], tools: Any = None
) -> Rendered:
    """
    A conversation, with the spans of the turns of which the weight is above 0.

    Raises AmbiguousTurn with the number of a turn, from 1, and RenderError.
    """

    def request(part: Sequence[Message], prompt: bool = False) -> dict[str, Any]:
        return {"messages": list(part), "tools": tools, "add_generation_prompt": prompt}

    trained = [number for number, weight in enumerate(weights) if weight]
    contents = [number for number, message in enumerate(messages) if _content(message)]
    nonces = [(secrets.token_hex(12), secrets.token_hex(12)) for _ in contents]
    requests = [request(messages)]
    for number in trained:
        requests += [
            request(messages[:number], prompt=messages[number].get("role") == "assistant"),
            request(messages[: number + 1]),
        ]
    for number, pair in zip(contents, nonces, strict=True):
        requests += [request(_replaced(messages, number, nonce)) for nonce in pair]
    whole, *rest = template.render(requests)
    prefixes = list(zip(rest[: 2 * len(trained) : 2], rest[1 : 2 * len(trained) : 2], strict=True))
    others = rest[2 * len(trained) :]
    found = {
        number: _content_span(whole, others[2 * place : 2 * place + 2], nonces[place], _content(messages[number]))
        for place, number in enumerate(contents)
    }
    spans = [
        _span(whole, before, after, found.get(number), number, weights[number])
        for number, (before, after) in zip(trained, prefixes, strict=True)
    ]
    if any(one.last > other.first for one, other in pairwise(spans)):
        raise AmbiguousTurn(f"the template renders two turns into one another; {OFFER}")
    return Rendered(whole, tuple(spans), {number: span for number, span in found.items() if span})


def _span(whole: str, before: str, after: str, content: tuple[int, int] | None, number: int, weight: float) -> Span:
    if not (after.startswith(before) and whole.startswith(after)):
        why = "otherwise at the end of a conversation than before other turns, or after another prompt"
        raise AmbiguousTurn(f"turn {number + 1}: the template renders it {why}; {OFFER}")
    first, last = len(before), len(after)
    if content is not None and not first <= content[0] <= content[1] <= last:
        raise AmbiguousTurn(f"turn {number + 1}: its content is not where the template puts an answer; {OFFER}")
    # What a template writes between turns, such as a line's end, is no part of an answer.
    end = max(first + len(whole[first:last].rstrip()), content[1] if content else first)
    return Span(first, end, weight)


def _content(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _replaced(messages: Sequence[Message], number: int, nonce: str) -> list[Message]:
    return [*messages[:number], {**messages[number], "content": nonce}, *messages[number + 1 :]]


def _content_span(whole: str, others: Sequence[str], nonces: Sequence[str], content: str) -> tuple[int, int] | None:
    """Where a template puts content, whole or trimmed; None if that is not to be told."""
    sides = [other.split(nonce) for other, nonce in zip(others, nonces, strict=True)]
    if any(len(side) != 2 for side in sides) or sides[0] != sides[1]:
        return None
    before, after = sides[0]
    first, last = len(before), len(whole) - len(after)
    fits = first <= last and whole.startswith(before) and whole.endswith(after)
    return (first, last) if fits and whole[first:last] in (content, content.strip()) else None
