"""Encoder from conversations to prompts, by a chat template."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from drawloom.components.data.chat.prompt import encode_prompt_messages, find_answer_end
from drawloom.components.data.chat.template import ChatTemplate, RenderError
from drawloom.components.ports.corpus import ChatTokenizer, Tokenizer
from drawloom.graph import UserError, component, setting


@component(impact="safe", needs={"jinja2": "drawloom[chat]"})
class TemplatePrompts:
    """
    Prompts for answers: a conversation rendered by the tokenizer's chat template.

    An answer ends with the tokenizer's end token, or with the template's control token after an answer.
    """

    tokenizer: Tokenizer
    template: Path | None = setting(
        default=None, doc="file with a jinja2 chat template; default: the tokenizer's template"
    )
    date: str | None = setting(
        default=None, doc="date for templates with today's date, such as 2025-01-31; without it they fail"
    )
    system: str | None = setting(default=None, doc="system prompt, the first message of every conversation")
    _renderer: ChatTemplate | None = attrs.field(init=False, default=None)

    def close(self) -> None:
        """End the process that renders templates, if one is running."""
        if self._renderer is not None:
            self._renderer.close()

    def list_input_files(self) -> dict[str, list[Path]]:
        """Return the template file, if there is one."""
        return {} if self.template is None else {"template": [self.template]}

    @cached_property
    def answer_ends(self) -> frozenset[int]:
        tokenizer, template = self._chat_tokenizer, self._open_template()
        try:
            end = find_answer_end(tokenizer, template)
        except RenderError:  # a template may require more than a question and an answer
            end = None
        return frozenset({tokenizer.eos_id} if end is None else {tokenizer.eos_id, end})

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        try:
            return encode_prompt_messages(self._chat_tokenizer, self._open_template(), [*first, *messages])
        except ValueError as error:
            prefix = "the chat template refuses the conversation: " if isinstance(error, RenderError) else ""
            raise UserError(f"{prefix}{error}") from error

    @property
    def _chat_tokenizer(self) -> ChatTokenizer:
        """The tokenizer. Raises UserError if it has no control tokens."""
        if not isinstance(self.tokenizer, ChatTokenizer):
            name = type(self.tokenizer).__name__
            text = f"the tokenizer {name} has no chat template and no control tokens"
            raise UserError(f"{text}; use a model that was trained on conversations, with its tokenizer", 2)
        return self.tokenizer

    def _open_template(self) -> ChatTemplate:
        """Return the renderer, started once. Raises UserError if the template is missing or unreadable."""
        if self._renderer is None:
            tokenizer = self._chat_tokenizer
            self._renderer = ChatTemplate(self._read_template(tokenizer), tokenizer.template_tokens, self.date)
        return self._renderer

    def _read_template(self, tokenizer: ChatTokenizer) -> str | None:
        """Return the template's text. Raises UserError if the file can't be read."""
        if self.template is None:
            return tokenizer.chat_template
        try:
            return self.template.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"template: {self.template} can't be read ({error}); name a jinja2 file", 2) from error
