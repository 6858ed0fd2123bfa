"""
Messages, their turns' spans in a rendered conversation, and the end tokens of answers.

Templates read a message's content as a string, as a list of parts such as `{"type": "text", "text": "..."}`, or as
both. With the other form, jinja2 drops the text or writes a Python list, and raises no error.

Templates do not mark turns: the conversation is rendered turn by turn. A turn's span begins after the rendered earlier
turns with the generation prompt, which is the text that a model answers; the rendered conversation up to this turn, and
the whole one, must both start with that text. The content's span is also found by rendering the conversation with other
content in its place, and must be inside the turn's span. A template that violates this renders a turn differently once
other turns follow (such as an empty `<think>` only in the last turn), so the text to train is ambiguous: the turn is
refused instead of guessed. So is a turn whose content or tool calls are not in its text.

Most templates end an answer with a control token, such as `<|im_end|>`. In others (GLM-4, ChatGLM3, Hunyuan) the next
turn's first token ends the answer: a model stops there, so the answer is trained up to this token, as by the training
templates of TRL. After a conversation's last answer, this is the token of a user's turn, or of a tool's after a tool
call; without such a token it is the tokenizer's end token.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs

from drawloom.components.data.chat.render_process import REASONING
from drawloom.components.data.chat.template import ChatTemplate, RenderError, make_request
from drawloom.ports import ChatTokenizer

Message = Mapping[str, Any]

Tools = Sequence[Mapping[str, Any]] | None


def parse_tools(tools: Any) -> Tools:
    """Return a line's tools, also if they are JSON in a string. Raises ValueError unless they are a list of objects."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"its tools are a text that is not JSON ({error}); write a list of objects") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("its tools are not a list of objects; write each tool as a JSON schema in a list")
    return tools


def check_messages(messages: Sequence[Any]) -> None:
    """Raise ValueError for a message without a role, or with neither text nor tool calls."""
    for number, message in enumerate(messages, 1):
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise ValueError(f'turn {number} is not an object with a role; write {{"role": "user", "content": "..."}}')
        if fault := _find_tool_calls_fault(message.get("tool_calls")) or _find_content_fault(message):
            raise ValueError(f"turn {number}: {fault}")


def _find_content_fault(message: Message) -> str | None:
    """Return a message's fault in its content, or None."""
    content = message.get("content")
    if content is None:
        remedy = 'write content as text, or "" for an empty turn'
        return None if message.get("tool_calls") else f"it has neither content nor tool_calls; {remedy}"
    if not isinstance(content, str | list):
        return f"its content is {content!r}, not text; write a string, or a list of text parts"
    for number, part in enumerate(content if isinstance(content, list) else (), 1):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            remedy = 'write {"type": "text", "text": "..."}, or leave the line out'
            return f"part {number} of its content is {kind!r}, and only text can be read; {remedy}"
    return None


def _find_tool_calls_fault(calls: Any) -> str | None:
    """Return a message's fault in its tool calls, or None."""
    is_valid = isinstance(calls, list) and all(isinstance(get_tool_name(call), str) for call in calls)
    remedy = '[{"type": "function", "function": {"name": "...", "arguments": {...}}}]'
    return None if calls is None or is_valid else f"its tool_calls are not a list of named calls; write {remedy}"


def get_tool_name(call: Any) -> Any:
    """Return the name in a tool call or its `function`; None if it has none."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def get_text(message: Message) -> str:
    """Return a message's text; parts are joined."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def replace_text(messages: Sequence[Message], turn_index: int, text: str) -> list[Message]:
    """Return the messages, with a text as the content in one, a string or a single part as before."""
    as_parts = isinstance(messages[turn_index].get("content"), list)
    content = [{"type": "text", "text": text}] if as_parts else text
    return [*messages[:turn_index], {**messages[turn_index], "content": content}, *messages[turn_index + 1 :]]


def join_parts_unless_read(template: ChatTemplate, messages: Sequence[Message], tools: Tools) -> Sequence[Message]:
    """Return the messages, with a string in place of parts, unless the template reads parts."""
    lists = [index for index, message in enumerate(messages) if isinstance(message.get("content"), list)]
    if not lists:
        return messages
    kept = _find_turns_read_as_parts(template, messages, lists, tools)
    return [
        {**message, "content": get_text(message)} if index in lists and index not in kept else message
        for index, message in enumerate(messages)
    ]


def split_strings_read_as_parts(
    template: ChatTemplate, messages: Sequence[Message], turns: Sequence[int], tools: Tools = None
) -> list[Message]:
    """Return the messages, with one part in place of the strings in `turns`, if the template reads only parts."""
    changed = _find_turns_read_as_parts(template, messages, turns, tools)
    return [
        {**message, "content": [{"type": "text", "text": get_text(message)}]} if index in changed else message
        for index, message in enumerate(messages)
    ]


def _find_turns_read_as_parts(
    template: ChatTemplate, messages: Sequence[Message], turns: Sequence[int], tools: Tools
) -> set[int]:
    """Return the turns whose text the template writes from a part; a quoted text is from a list written as a whole."""
    nonces = {index: secrets.token_hex(12) for index in turns}
    trial = [
        {**message, "content": [{"type": "text", "text": nonces[index]}]} if index in nonces else message
        for index, message in enumerate(messages)
    ]
    try:
        text = template.render_messages(trial, tools)
    except RenderError:  # such as for a list that is added to a string
        return set()
    return {index for index, nonce in nonces.items() if re.search(rf"(?<!['\"]){nonce}", text)}


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

    Raises EarlierTurnError for turns that overlap, EarlierTurnError or ValueError with a turn's number, from 1, and
    RenderError.
    """
    messages = join_parts_unless_read(template, messages, tools)
    trained_turns = [number for number, weight in enumerate(weights) if weight]
    # Two nonces, because the text around a content may depend on the content.
    nonces = {
        number: (secrets.token_hex(12), secrets.token_hex(12))
        for number, message in enumerate(messages)
        if get_text(message)
    }
    requests: dict[object, Any] = {"whole": make_request(messages, tools)}
    for number in trained_turns:
        is_answer = messages[number].get("role") == "assistant"
        requests["before", number] = make_request(messages[:number], tools, prompt=is_answer)
        requests["through", number] = make_request(messages[: number + 1], tools)
    for number, pair in nonces.items():
        for nonce in pair:
            requests[nonce] = make_request(replace_text(messages, number, nonce), tools)
    texts = dict(zip(requests, template.render([*requests.values()]), strict=True))
    turns_with_dropped_text = [number for number, (nonce, _) in nonces.items() if nonce not in texts[nonce]]
    if strings := [number for number in turns_with_dropped_text if isinstance(messages[number]["content"], str)]:
        changed = split_strings_read_as_parts(template, messages, strings, tools)
        if changed != list(messages):
            return render_and_locate_turns(template, changed, weights, tools)
    whole = texts["whole"]
    content_spans = {
        number: _find_content_span(whole, [texts[nonce] for nonce in pair], pair, get_text(messages[number]))
        for number, pair in nonces.items()
    }
    spans = [
        _find_turn_span(
            whole,
            texts["before", number],
            texts["through", number],
            content_spans.get(number),
            number,
            weights[number],
        )
        for number in trained_turns
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
    """Raise ValueError if a part of a turn is not in its rendered text; white space may differ."""
    reasoning = next((message[key] for key in REASONING if message.get(key)), None)
    parts = [("its content", get_text(message)), ("its reasoning", reasoning)]
    for call in message.get("tool_calls") or ():
        name = get_tool_name(call)
        arguments = call.get("function", call).get("arguments")
        parts += [(f"its call of {name}", name), (f"the arguments of {name} as a text", arguments)]
    squeezed = [(kind, re.sub(r"\s+", "", part)) for kind, part in parts if isinstance(part, str)]
    rest = re.sub(r"\s+", "", text)
    for kind, part in sorted(squeezed, key=lambda pair: -len(pair[1])):  # a short part may be in a longer one
        if part not in rest:
            remedy = 'write the turn as the template renders it, or template = "chat.jinja", a file with another one'
            raise ValueError(f"turn {turn_index + 1}: the template leaves {kind} out, or changes it; {remedy}")
        rest = rest.replace(part, "", 1)


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


QUESTION = {"role": "user", "content": "Hello"}


def extend_answers_to_end_tokens(
    template: ChatTemplate, rendered: Rendered, tools: Tools, control_tokens: Sequence[str]
) -> Rendered:
    """
    Return the conversation with every trained answer extended to its end token.

    Text is added only after the last turn. Raises EarlierTurnError for an answer without an end token.
    """
    text, messages, end_weight = rendered.text, rendered.messages, 0.0
    spans: list[Span] = []
    for span in rendered.trained:
        content_end = rendered.contents.get(span.turn, (span.first, span.first))[1]
        is_ended = _get_control_token_at_end(text[content_end : span.last], control_tokens) is not None
        if messages[span.turn]["role"] != "assistant" or is_ended:
            spans.append(span)
            continue
        is_last = span.turn == len(messages) - 1
        continued = _render_with_next_turn(template, messages, tools) if is_last else text
        end = match_control_token_after(text[: span.last], continued, control_tokens)
        if end is None and not is_last:
            reason = "no control token ends it or begins the next turn, so a model would not learn to stop"
            raise EarlierTurnError(f"turn {span.turn + 1}: {reason}")
        if is_last and end is None:
            text, end_weight = text[: span.last], span.weight
        elif is_last:
            text = continued[:end]
        spans.append(attrs.evolve(span, last=end or span.last))
    return attrs.evolve(rendered, text=text, trained=tuple(spans), end_weight=end_weight)


def find_turn_end_ids(tokenizer: ChatTokenizer, template: ChatTemplate) -> frozenset[int]:
    """
    Return the control tokens after a template's answers and tool calls; empty if there are none.

    Models trained on conversations predict these tokens, and stop.
    """
    nonce = secrets.token_hex(12)
    call = {"id": "call00000", "type": "function", "function": {"name": nonce, "arguments": {}}}
    answers = ({"role": "assistant", "content": nonce}, {"role": "assistant", "content": "", "tool_calls": [call]})
    tokens = (_find_end_token(template, [QUESTION, answer], nonce, tokenizer.control_tokens) for answer in answers)
    return frozenset(int(tokenizer.encode_with_control_tokens(token)[0]) for token in tokens if token)


def _find_end_token(
    template: ChatTemplate, messages: Sequence[Message], nonce: str, control_tokens: Sequence[str]
) -> str | None:
    """Return the last message's end token; its text or call is the nonce. None if unknown."""
    try:
        text = template.render_messages(messages)
        if nonce not in text:
            messages = split_strings_read_as_parts(template, messages, range(len(messages)))
            text = template.render_messages(messages)
    except RenderError:  # a template may require more than a question and an answer
        return None
    if nonce not in text:
        return None
    begin = text[: text.index(nonce) + len(nonce)]
    if "tool_calls" in messages[-1]:
        if token := _get_control_token_at_end(text[len(begin) :], control_tokens):
            return token
        begin = text.rstrip()
    for continued in (text, _render_with_next_turn(template, messages, None)):
        if end := match_control_token_after(begin, continued, control_tokens):
            return continued[len(begin) : end].lstrip()
    return None


def _render_with_next_turn(template: ChatTemplate, messages: Sequence[Message], tools: Tools) -> str:
    """Return the conversation with a user's turn after it, or a tool's after a tool call; empty if it is refused."""
    following: Message = QUESTION
    if calls := messages[-1].get("tool_calls"):
        following = {
            "role": "tool",
            "name": get_tool_name(calls[0]),
            "tool_call_id": calls[0].get("id", ""),
            "content": "Hello",
        }
    try:
        return template.render_messages([*messages, following], tools)
    except RenderError:
        return ""


def _get_control_token_at_end(text: str, control_tokens: Sequence[str]) -> str | None:
    """Return an answer's last control token; None for a part's end, such as `</think>`."""
    stripped = text.rstrip()
    token = max((token for token in control_tokens if stripped.endswith(token)), key=len, default=None)
    closes = token is not None and token.startswith("</") and f"<{token[2:]}" in stripped
    return None if closes else token


def match_control_token_after(begin: str, text: str, control_tokens: Sequence[str]) -> int | None:
    """Return the end of the control token after `begin` and white space in a text; None without any."""
    if not text.startswith(begin):
        return None
    alternatives = "|".join(map(re.escape, sorted(control_tokens, key=len, reverse=True))) or "(?!)"
    match = re.compile(rf"\s*(?:{alternatives})").match(text, len(begin))
    return match and match.end()
