"""Encoding from rendered conversations and prompts to token ids and loss weights."""

import datetime
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from drawloom import UserError, internal, setting
from drawloom.components.data.chat.template import ChatTemplate, create_chat_template
from drawloom.components.data.chat.turns import (
    QUESTION,
    Rendered,
    Span,
    Tools,
    check_messages,
    extend_answers_to_end_tokens,
    find_turn_end_ids,
    get_text,
    get_tool_name,
    match_control_token_after,
    parse_tools,
    render_and_locate_turns,
)
from drawloom.graph import component_base_class
from drawloom.ports import ChatTokenizer, Tokenizer, complete_document, find_end_ids


@attrs.frozen
class Encoded:
    """
    Encoded document. ids: int32 (tokens,); weights: float32 (tokens,), token weights as targets.

    `straddles` is true if the text as a whole encodes to other ids, because a token would cross the beginning or end of
    a trained part. `reference` is the log-probability of the trained tokens under another model, if the data have one.
    `label` is a number for the loss, such as a margin.
    """

    ids: np.ndarray
    weights: np.ndarray
    straddles: bool = False
    reference: float | None = None
    label: float | None = None


def encode_conversation(
    tokenizer: ChatTokenizer,
    template: ChatTemplate,
    messages: Sequence[Any],
    weights: Sequence[float],
    tools: Any = None,
) -> Encoded:
    """
    Render and encode a conversation; turns with a weight above 0 are trained, answers with their end token.

    `weights` has a loss weight per message; `tools` are a list of JSON schemas, also as text. Every text path calls
    this function or `encode_prompt_messages`. Raises ValueError for messages or tools with text or values lost in the
    rendering, and for tools with a control token.
    """
    check_messages(messages)
    tools = parse_tools(tools)
    rendered = render_and_locate_turns(template, messages, weights, tools)
    rendered = extend_answers_to_end_tokens(template, rendered, tools, tokenizer.control_tokens)
    return encode_rendered_conversation(tokenizer, rendered, tools)


def encode_prompt_messages(
    tokenizer: ChatTokenizer, template: ChatTemplate, messages: Sequence[Any], tools: Any = None
) -> np.ndarray:
    """
    Render messages up to the answer's beginning, and encode the text: int32 (tokens,).

    Control tokens spelled out in a message are encoded as text. Raises ValueError as `encode_conversation` does, or if
    the template renders the messages differently before an answer.
    """
    check_messages(messages)
    tools = parse_tools(tools)
    rendered = render_and_locate_turns(template, messages, [0.0] * len(messages), tools)
    whole = template.render_messages(rendered.messages, tools, prompt=True)
    if not whole.startswith(rendered.text):
        raise ValueError("the template renders the messages differently before an answer; use another template")
    return encode_rendered_conversation(tokenizer, attrs.evolve(rendered, text=whole), tools).ids


def encode_message_alone(
    tokenizer: ChatTokenizer, template: ChatTemplate, message: Mapping[str, Any], end_ids: frozenset[int]
) -> np.ndarray:
    """
    Encode a template's text for a message after an answer, up to the next answer: int32 (tokens,).

    The answer's end token is left out: sampled ids have it. Earlier turns are not rendered, so a template may strip
    thoughts from them. Raises ValueError as `encode_prompt_messages` does.
    """
    nonce = secrets.token_hex(12)
    messages = [QUESTION, {"role": "assistant", "content": nonce}, dict(message)]
    rendered = render_and_locate_turns(template, messages, [0.0] * 3)
    whole = template.render_messages(rendered.messages, prompt=True)
    if not whole.startswith(rendered.text) or nonce not in whole:
        raise ValueError("the template renders the messages differently before an answer; use another template")
    cut = whole.index(nonce) + len(nonce)
    end = match_control_token_after(whole[:cut], whole, tokenizer.control_tokens)
    if end is not None and int(tokenizer.encode_with_control_tokens(whole[cut:end].lstrip())[-1]) in end_ids:
        cut = end
    span = Span(2, cut, len(whole), 1.0)
    encoded = encode_rendered_conversation(tokenizer, attrs.evolve(rendered, text=whole, trained=(span,)), None)
    return encoded.ids[encoded.weights > 0]


def encode_rendered_conversation(tokenizer: ChatTokenizer, rendered: Rendered, tools: Tools) -> Encoded:
    """
    Encode a conversation. The text before a trained part is encoded separately, as it is when a model answers.

    Only the template can write control tokens: a control token spelled out in content is encoded as text. Raises
    ValueError if one can't be distinguished from the template's text, as in the rendered `tools`, or for a tool that
    the template leaves out.
    """
    control = re.compile("|".join(map(re.escape, tokenizer.control_tokens)) or "(?!)")
    forged = _find_forged_control_spans(control, rendered, tools)
    for name in map(get_tool_name, tools or ()):
        if isinstance(name, str) and name not in rendered.text:
            raise ValueError(f"the template leaves the tool {name} out; use another template, or leave out tools")
    cuts = {0, len(rendered.text)}
    cuts |= {cut for span in rendered.trained for cut in (span.first, span.last)}
    cuts |= {cut for span in forged for cut in span}
    ids, weights, before = [np.empty(0, np.int32)], [np.empty(0, np.float32)], ""
    for first, last in pairwise(sorted(cuts)):
        text = rendered.text[first:last]
        is_content = any(begin <= first and last <= end for begin, end in forged)
        part_ids = encode_after(before, text, tokenizer.encode if is_content else tokenizer.encode_with_control_tokens)
        before = "" if forged else text[-64:]  # a longer one would be encoded twice for nothing
        weight = next((span.weight for span in rendered.trained if span.first <= first and last <= span.last), 0.0)
        ids.append(part_ids)
        weights.append(np.full(len(part_ids), weight, np.float32))
    joined = np.concatenate(ids)
    whole_text_ids = joined if forged else tokenizer.encode_with_control_tokens(rendered.text)
    straddles = not np.array_equal(whole_text_ids, joined)
    if rendered.end_weight:
        joined = np.append(joined, np.int32(tokenizer.eos_id))
        weights.append(np.full(1, rendered.end_weight, np.float32))
    return Encoded(joined, np.concatenate(weights), straddles)


def _find_forged_control_spans(control: re.Pattern[str], rendered: Rendered, tools: Tools) -> list[tuple[int, int]]:
    """
    Return the spans in `rendered.text` for contents with a spelled-out control token. Raises ValueError if such a token
    is outside of a located content.
    """
    forged = []
    for number, message in enumerate(rendered.messages):
        content = get_text(message)
        other_keys = {key: value for key, value in message.items() if key != "content"}
        if match := control.search(json.dumps(other_keys, ensure_ascii=False)):
            text = f"turn {number + 1} contains the control token {match[0]} outside of its content"
            raise ValueError(f"{text}; remove it there")
        if match := control.search(content):
            if number not in rendered.contents:
                text = f"turn {number + 1} contains the control token {match[0]}"
                reason = "the template changes this turn's content, so the token can't be distinguished from its own"
                raise ValueError(f"{text}, and {reason}; remove the token")
            forged.append(rendered.contents[number])
    if match := control.search(json.dumps(tools, ensure_ascii=False)):
        raise ValueError(f"a tool contains the control token {match[0]}; remove it there")
    return forged


def encode_after(before: str, text: str, encode: Callable[[str], np.ndarray]) -> np.ndarray:
    """
    Encode a text that follows another one: int32 (tokens,).

    Tokenizers like SentencePiece put a space before a text alone (Llama 2, Mistral), which is not in the whole text.
    """
    before_ids, whole_ids = encode(before), encode(before + text)
    if np.array_equal(whole_ids[: len(before_ids)], before_ids):
        return whole_ids[len(before_ids) :]
    return encode(text)  # a token crosses the border


def encode_prompt_and_completion(tokenizer: ChatTokenizer, prompt: str, completion: str) -> Encoded:
    """
    Encode a prompt and its completion, both plain text, as a document; the completion and the end are trained.
    """
    prompt_ids = tokenizer.encode(prompt)
    text_ids = np.concatenate([prompt_ids, encode_after(prompt, completion, tokenizer.encode)])
    ids = complete_document(tokenizer, text_ids)
    weights = np.ones(len(ids), np.float32)
    weights[: len(tokenizer.prefix_ids) + len(prompt_ids)] = 0.0
    return Encoded(ids, weights, not np.array_equal(tokenizer.encode(prompt + completion), text_ids))


def join_prompt_and_answer(prompt: Sequence[Any], answer: Sequence[Any]) -> list[Any]:
    """Return all messages. Raises ValueError for a bad message, or an answer that repeats the prompt."""
    if prompt and answer[: len(prompt)] == prompt:
        raise ValueError("an answer begins with the prompt, which would be there twice; leave one of them out")
    messages = [*prompt, *answer]
    check_messages(messages)
    return messages


def encode_prompt_with_answers(
    tokenizer: ChatTokenizer,
    template: ChatTemplate,
    row: Mapping[str, Any],
    prompt: Any,
    answers: Sequence[Any],
    forms: str,
) -> list[Encoded]:
    """
    Encode a row's prompt with its answers, all text or all messages; the assistant's turns in an answer are trained.

    Raises ValueError for a malformed row, with the `forms` that it may have.
    """
    parts = [prompt, *answers]
    if all(isinstance(part, str) for part in parts):
        return [encode_prompt_and_completion(tokenizer, prompt, answer) for answer in answers]
    if not all(isinstance(part, list) for part in parts):
        raise ValueError(f"it has {', '.join(row) or 'no keys'}; write {forms}")
    documents = []
    for answer in answers:
        messages = join_prompt_and_answer(prompt, answer)
        weights = [float(n >= len(prompt) and turn["role"] == "assistant") for n, turn in enumerate(messages)]
        documents.append(encode_conversation(tokenizer, template, messages, weights, row.get("tools")))
    return documents


@component_base_class
class PromptRenderer:
    """Base with a chat template, from the tokenizer or a file; its renderer is a process, started once."""

    tokenizer: Tokenizer
    template: Path | None = setting("file with a jinja2 chat template; default: the tokenizer's template", default=None)
    date: datetime.date | None = setting(
        "date for templates with today's date, such as 2025-01-31; without it they fail", default=None
    )
    _renderer: ChatTemplate | None = internal(None)

    def close(self) -> None:
        """End the process that renders templates, if one is running."""
        if self._renderer is not None:
            self._renderer.close()

    def list_input_files(self) -> dict[str, list[Path]]:
        """Return the template file, if there is one."""
        return {} if self.template is None else {"template": [self.template]}

    def get_or_create_chat_template(self, tokenizer: ChatTokenizer) -> ChatTemplate:
        """Return the renderer, started once. Raises UserError if the template is missing or unreadable."""
        if self._renderer is None:
            self._renderer = create_chat_template(tokenizer, self.template, self.date)
        return self._renderer

    @cached_property
    def answer_end_ids(self) -> frozenset[int]:
        if not isinstance(self.tokenizer, ChatTokenizer):
            return frozenset()
        try:
            template = self.get_or_create_chat_template(self.tokenizer)
            return find_end_ids(self.tokenizer) | find_turn_end_ids(self.tokenizer, template)
        except UserError:  # without a template there are no conversations
            return frozenset()

    def __getstate__(self) -> dict[str, Any]:
        """Return what worker processes need; each starts a renderer of its own."""
        return {**self.__dict__, "_renderer": None}
