"""Prompts for a model's answer, encoded from conversations."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from drawloom.components.data.chat.encode import encode_rendered_conversation
from drawloom.components.data.chat.template import ChatTemplate
from drawloom.components.data.chat.turns import Rendered, render_and_locate_turns
from drawloom.components.ports.corpus import ChatTokenizer


def encode_prompt_messages(
    tokenizer: ChatTokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Any = None
) -> np.ndarray:
    """
    Render messages up to the answer's beginning, and encode the text: int32 (tokens,).

    Control tokens spelled out in a message are encoded as text. Raises ValueError if the template rejects the messages,
    or renders them differently before an answer.
    """
    rendered = render_and_locate_turns(template, messages, [0.0] * len(messages), tools)
    request = {"messages": list(messages), "tools": tools, "add_generation_prompt": True}
    (whole,) = template.render([request])
    if not whole.startswith(rendered.text):
        raise ValueError("the template renders the messages differently before an answer; use another template")
    return encode_rendered_conversation(tokenizer, Rendered(whole, (), rendered.contents), messages, tools).ids


def find_answer_end_id(tokenizer: ChatTokenizer, template: ChatTemplate) -> int | None:
    """
    Return the template's control token after an answer, such as `<|im_end|>`; None if there is none.

    Models trained on conversations predict this token at the end of an answer.
    """
    answer = secrets.token_hex(12)
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": answer}]
    (text,) = template.render([{"messages": messages, "tools": None, "add_generation_prompt": False}])
    after = text.partition(answer)[2].lstrip()
    if not after.startswith(tuple(tokenizer.control_tokens)):
        return None
    return int(tokenizer.encode_with_control_tokens(after)[0])
