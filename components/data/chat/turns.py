"""
Turn spans in a rendered conversation, found by rendering it turn by turn.

Templates do not mark turns. A turn's span begins after the rendered earlier turns with the generation prompt, which is
the text that a model answers; the rendered conversation up to this turn, and the whole one, must both start with that
text. The content's span is also found by rendering the conversation with other content in its place, and must be inside
the turn's span. A template that violates this renders a turn differently once other turns follow (such as an empty
`<think>` only in the last turn), so the text to train is ambiguous: the turn is refused instead of guessed.
"""

import secrets
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs

from drawloom.components.data.chat.template import ChatTemplate

Message = Mapping[str, Any]

REMEDY = 'write turns = "last" or turns = "one_row_per_turn"'


class AmbiguousTurnError(ValueError):
    """A turn without a certain span, such as one rendered differently within a conversation and at its end."""


@attrs.frozen
class Span:
    """Text span from `first` to before `last`, with its tokens' weight as targets."""

    first: int
    last: int
    weight: float


@attrs.frozen
class Rendered:
    """
    A conversation's text, with the spans to train, and the content spans, which the template did not write.

    `contents` is by message number, from 0; a message whose content can't be located is absent.
    """

    text: str
    trained: tuple[Span, ...]
    contents: Mapping[int, tuple[int, int]]


def render_and_locate_turns(
    template: ChatTemplate, messages: Sequence[Message], weights: Sequence[float], tools: Any = None
) -> Rendered:
    """
    Render a conversation, and locate the turns with a weight above 0.

    Raises AmbiguousTurnError with the turn's number, from 1, and RenderError.
    """

    def make_request(part: Sequence[Message], prompt: bool = False) -> dict[str, Any]:
        """Return a rendering request."""
        return {"messages": list(part), "tools": tools, "add_generation_prompt": prompt}

    trained = [number for number, weight in enumerate(weights) if weight]
    contents = [number for number, message in enumerate(messages) if _get_text_content(message)]
    nonces = [(secrets.token_hex(12), secrets.token_hex(12)) for _ in contents]
    requests = [make_request(messages)]
    for number in trained:
        requests += [
            make_request(messages[:number], prompt=messages[number].get("role") == "assistant"),
            make_request(messages[: number + 1]),
        ]
    for number, pair in zip(contents, nonces, strict=True):
        requests += [make_request(_replace_content(messages, number, nonce)) for nonce in pair]
    whole, *rest = template.render(requests)
    prefixes = list(zip(rest[: 2 * len(trained) : 2], rest[1 : 2 * len(trained) : 2], strict=True))
    others = rest[2 * len(trained) :]
    content_spans = {
        number: _find_content_span(
            whole, others[2 * index : 2 * index + 2], nonces[index], _get_text_content(messages[number])
        )
        for index, number in enumerate(contents)
    }
    spans = [
        _find_turn_span(whole, before, after, content_spans.get(number), number, weights[number])
        for number, (before, after) in zip(trained, prefixes, strict=True)
    ]
    if any(span.last > following.first for span, following in pairwise(spans)):
        raise AmbiguousTurnError(f"two turns to train overlap in the rendered text; {REMEDY}")
    return Rendered(whole, tuple(spans), {number: span for number, span in content_spans.items() if span})


def _find_turn_span(
    whole_text: str,
    text_before_turn: str,
    text_through_turn: str,
    content_span: tuple[int, int] | None,
    turn_index: int,
    weight: float,
) -> Span:
    """Return a turn's span, given the text rendered up to its beginning and to its end. Raises AmbiguousTurnError."""
    if not (text_through_turn.startswith(text_before_turn) and whole_text.startswith(text_through_turn)):
        why = "differently when other turns follow, or after a generation prompt"
        raise AmbiguousTurnError(f"turn {turn_index + 1}: the template renders it {why}; {REMEDY}")
    first, last = len(text_before_turn), len(text_through_turn)
    if content_span is not None and not first <= content_span[0] <= content_span[1] <= last:
        raise AmbiguousTurnError(
            f"turn {turn_index + 1}: its rendered content is not inside the rendered turn; {REMEDY}"
        )
    # Exclude text of the template between turns, such as a line end.
    end = max(first + len(whole_text[first:last].rstrip()), content_span[1] if content_span else first)
    return Span(first, end, weight)


def _get_text_content(message: Message) -> str:
    """Return a message's content if it is text, otherwise an empty string."""
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _replace_content(messages: Sequence[Message], turn_index: int, nonce: str) -> list[Message]:
    """Return the messages, with a nonce as the content in one."""
    return [*messages[:turn_index], {**messages[turn_index], "content": nonce}, *messages[turn_index + 1 :]]


def _find_content_span(
    whole_text: str, texts_with_nonce: Sequence[str], nonces: Sequence[str], content: str
) -> tuple[int, int] | None:
    """
    Return a message's content span in `whole_text`, verbatim or stripped; None if it can't be located.

    `texts_with_nonce`: the conversation rendered with a nonce in place of this content, once per nonce.
    """
    sides = [other.split(nonce) for other, nonce in zip(texts_with_nonce, nonces, strict=True)]
    if any(len(side) != 2 for side in sides) or sides[0] != sides[1]:
        return None
    before, after = sides[0]
    first, last = len(before), len(whole_text) - len(after)
    fits = first <= last and whole_text.startswith(before) and whole_text.endswith(after)
    return (first, last) if fits and whole_text[first:last] in (content, content.strip()) else None
