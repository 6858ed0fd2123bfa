"""
End tokens of answers.

Most templates end an answer with a control token, such as `<|im_end|>`. In others (GLM-4, ChatGLM3, Hunyuan) the next
turn's first token ends the answer: a model stops there, so the answer is trained up to this token, as by the
training templates of TRL. After a conversation's last answer, this is the token of a user's turn, or of a tool's after
a tool call; without such a token it is the tokenizer's end token.
"""

import re
import secrets
from collections.abc import Sequence
from typing import Any

import attrs

from drawloom.components.data.chat.messages import Message, Tools, get_tool_name, split_strings_read_as_parts
from drawloom.components.data.chat.template import ChatTemplate, RenderError
from drawloom.components.data.chat.turns import EarlierTurnError, Rendered, Span
from drawloom.components.ports.corpus import ChatTokenizer

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
        end = _match_control_token_after(text[: span.last], continued, control_tokens)
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

    def render(part: Sequence[Message]) -> str:
        (text,) = template.render([_make_request(part, None)])
        return text

    try:
        text = render(messages)
        if nonce not in text:
            messages = split_strings_read_as_parts(render, messages, range(len(messages)))
            text = render(messages)
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
        if end := _match_control_token_after(begin, continued, control_tokens):
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
        (text,) = template.render([_make_request([*messages, following], tools)])
    except RenderError:
        return ""
    return text


def _make_request(messages: Sequence[Message], tools: Tools) -> dict[str, Any]:
    """Return a rendering request without a generation prompt."""
    return {"messages": list(messages), "tools": tools, "add_generation_prompt": False}


def _get_control_token_at_end(text: str, control_tokens: Sequence[str]) -> str | None:
    """Return an answer's last control token; None for a part's end, such as `</think>`."""
    stripped = text.rstrip()
    token = max((token for token in control_tokens if stripped.endswith(token)), key=len, default=None)
    closes = token is not None and token.startswith("</") and f"<{token[2:]}" in stripped
    return None if closes else token


def _match_control_token_after(begin: str, text: str, control_tokens: Sequence[str]) -> int | None:
    """Return the end of the control token after `begin` and white space in a text; None without any."""
    if not text.startswith(begin):
        return None
    alternatives = "|".join(map(re.escape, sorted(control_tokens, key=len, reverse=True))) or "(?!)"
    match = re.compile(rf"\s*(?:{alternatives})").match(text, len(begin))
    return match and match.end()
