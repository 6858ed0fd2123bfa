"""
Messages and tools of a line: accepted JSON, and the form of content in a template's view.

Templates read a message's content as a string, as a list of parts such as `{"type": "text", "text": "..."}`, or as
both. With the other form, jinja2 drops the text or writes a Python list, and raises no error.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drawloom.components.data.chat.template import RenderError

Message = Mapping[str, Any]

Tools = Sequence[Mapping[str, Any]] | None

Render = Callable[[Sequence[Message]], str]


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


def join_parts_unless_read(render: Render, messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages, with a string in place of parts, unless the template reads parts."""
    lists = [index for index, message in enumerate(messages) if isinstance(message.get("content"), list)]
    if not lists:
        return messages
    kept = _find_turns_read_as_parts(render, messages, lists)
    return [
        {**message, "content": get_text(message)} if index in lists and index not in kept else message
        for index, message in enumerate(messages)
    ]


def split_strings_read_as_parts(render: Render, messages: Sequence[Message], turns: Sequence[int]) -> list[Message]:
    """Return the messages, with one part in place of the strings in `turns`, if the template reads only parts."""
    changed = _find_turns_read_as_parts(render, messages, turns)
    return [
        {**message, "content": [{"type": "text", "text": get_text(message)}]} if index in changed else message
        for index, message in enumerate(messages)
    ]


def _find_turns_read_as_parts(render: Render, messages: Sequence[Message], turns: Sequence[int]) -> set[int]:
    """Return the turns whose text the template writes from a part; a quoted text is from a list written as a whole."""
    nonces = {index: secrets.token_hex(12) for index in turns}
    trial = [
        {**message, "content": [{"type": "text", "text": nonces[index]}]} if index in nonces else message
        for index, message in enumerate(messages)
    ]
    try:
        text = render(trial)
    except RenderError:  # such as for a list that is added to a string
        return set()
    return {index for index, nonce in nonces.items() if re.search(rf"(?<!['\"]){nonce}", text)}
