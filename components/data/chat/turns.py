"""
Turn spans in a rendered conversation, found by rendering it turn by turn.

Templates do not mark turns. A turn's span begins after the rendered earlier turns with the generation prompt, which is
the text that a model answers; the rendered conversation up to this turn, and the whole one, must both start with that
text. The content's span is also found by rendering the conversation with other content in its place, and must be inside
the turn's span. A template that violates this renders a turn differently once other turns follow (such as an empty
`<think>` only in the last turn), so the text to train is ambiguous: the turn is refused instead of guessed. So is a
turn whose content or tool calls are not in its text.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs

from drawloom.components.data.chat.messages import (
    Message,
    Tools,
    get_text,
    get_tool_name,
    join_parts_unless_read,
    replace_text,
    split_strings_read_as_parts,
)
from drawloom.components.data.chat.template import ChatTemplate

MAX_QUOTED = 40
"""Characters of a template's text in an error message."""


class EarlierTurnError(ValueError):
    """A turn unsuitable for training with other turns after it, but possibly suitable as the last one."""


@attrs.frozen
class Span:
    """Text span from `first` to before `last` for a turn, with its tokens' weight as targets; turns count from 0."""

    turn: int
    first: int
    last: int
    weight: float


@attrs.frozen
class Rendered:
    """
    A conversation's text, with the spans to train, and the content spans, which the template did not write.

    `messages` have their contents in the template's form. `contents` is by message number, from 0; a
    message whose content can't be located is absent. After the text, an end token is trained with weight `end_weight`.
    """

    text: str
    messages: Sequence[Message]
    trained: tuple[Span, ...]
    contents: Mapping[int, tuple[int, int]]
    end_weight: float = 0.0


def render_and_locate_turns(
    template: ChatTemplate, messages: Sequence[Message], weights: Sequence[float], tools: Tools = None
) -> Rendered:
    """
    Render a conversation, and locate the turns with a weight above 0.

    Raises EarlierTurnError or ValueError with the turn's number, from 1, and RenderError.
    """

    def make_request(part: Sequence[Message], prompt: bool = False) -> dict[str, Any]:
        """Return a rendering request."""
        return {"messages": list(part), "tools": tools, "add_generation_prompt": prompt}

    def render(part: Sequence[Message]) -> str:
        (text,) = template.render([make_request(part)])
        return text

    messages = join_parts_unless_read(render, messages)
    trained = [number for number, weight in enumerate(weights) if weight]
    contents = [number for number, message in enumerate(messages) if get_text(message)]
    nonces = [(secrets.token_hex(12), secrets.token_hex(12)) for _ in contents]
    requests = [make_request(messages)]
    for number in trained:
        requests += [
            make_request(messages[:number], prompt=messages[number].get("role") == "assistant"),
            make_request(messages[: number + 1]),
        ]
    for number, pair in zip(contents, nonces, strict=True):
        requests += [make_request(replace_text(messages, number, nonce)) for nonce in pair]
    whole, *rest = template.render(requests)
    prefixes = list(zip(rest[: 2 * len(trained) : 2], rest[1 : 2 * len(trained) : 2], strict=True))
    others = rest[2 * len(trained) :]
    lost = [number for index, number in enumerate(contents) if nonces[index][0] not in others[2 * index]]
    if strings := [number for number in lost if isinstance(messages[number]["content"], str)]:
        changed = split_strings_read_as_parts(render, messages, strings)
        if changed != list(messages):
            return render_and_locate_turns(template, changed, weights, tools)
    content_spans = {
        number: _find_content_span(whole, others[2 * index : 2 * index + 2], nonces[index], get_text(messages[number]))
        for index, number in enumerate(contents)
    }
    spans = [
        _find_turn_span(whole, before, after, content_spans.get(number), number, weights[number])
        for number, (before, after) in zip(trained, prefixes, strict=True)
    ]
    if any(span.last > following.first for span, following in pairwise(spans)):
        raise EarlierTurnError("two turns to train overlap in the rendered text")
    for span in spans:
        _check_turn_is_in_text(whole[span.first : span.last], messages[span.turn], span.turn)
    return Rendered(whole, messages, tuple(spans), {number: span for number, span in content_spans.items() if span})


def _find_turn_span(
    whole_text: str,
    text_before_turn: str,
    text_through_turn: str,
    content_span: tuple[int, int] | None,
    turn_index: int,
    weight: float,
) -> Span:
    """
    Return a turn's span, given the text rendered up to its beginning and to its end.

    Raises EarlierTurnError, or ValueError if the turn does not continue the generation prompt.
    """
    if not text_through_turn.startswith(text_before_turn):
        same = next(
            (index for index, (a, b) in enumerate(zip(text_before_turn, text_through_turn, strict=False)) if a != b),
            min(len(text_before_turn), len(text_through_turn)),
        )
        prompt, turn = (text[same : same + MAX_QUOTED] for text in (text_before_turn, text_through_turn))
        text = f"a model answers after {prompt!r}, and with the answer the template writes {turn!r} there"
        raise ValueError(
            f"turn {turn_index + 1}: {text}, so the answer's text is uncertain; "
            'write template = "chat.jinja", a copy in which both are equal'
        )
    if not whole_text.startswith(text_through_turn):
        raise EarlierTurnError(f"turn {turn_index + 1}: the template renders it differently when other turns follow")
    first, last = len(text_before_turn), len(text_through_turn)
    if content_span is not None and not first <= content_span[0] <= content_span[1] <= last:
        raise EarlierTurnError(f"turn {turn_index + 1}: its rendered content is not inside the rendered turn")
    # Exclude text of the template between turns, such as a line end.
    end = max(first + len(whole_text[first:last].rstrip()), content_span[1] if content_span else first)
    return Span(turn_index, first, end, weight)


def _check_turn_is_in_text(text: str, message: Message, turn_index: int) -> None:
    """Raise ValueError if a turn's content or tool calls are not in its rendered text; white space may differ."""
    rendered, content = (re.sub(r"\s+", "", part) for part in (text, get_text(message)))
    remedy = 'write the turn as the template renders it, or template = "chat.jinja", a file with another one'
    if content not in rendered:
        raise ValueError(f"turn {turn_index + 1}: the template leaves its content out, or changes it; {remedy}")
    rest = rendered.replace(content, "", 1)
    for name in map(get_tool_name, message.get("tool_calls") or ()):
        if re.sub(r"\s+", "", name) not in rest:
            raise ValueError(f"turn {turn_index + 1}: the template leaves its call of {name} out; {remedy}")


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
