"""Encoder from conversations to prompts, by a chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from drawloom import UserError, component, setting
from drawloom.components.data.chat.encode import PromptRenderer, encode_message_alone, encode_prompt_messages
from drawloom.components.data.chat.template import RenderError
from drawloom.ports import ChatTokenizer

PROBE = "a message to find again"


@component(impact="safe", needs={"jinja2": "drawloom[chat]"})
class TemplatePrompts(PromptRenderer):
    """
    Prompts for answers: a conversation rendered by the tokenizer's chat template.

    An answer ends with an end token of the model folder, or with the template's control token after an answer.
    """

    system: str | None = setting("system prompt, the first message of every conversation", default=None)

    def encode_messages_as_prompt(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        tokenizer = self._chat_tokenizer
        template = self.get_or_create_chat_template(tokenizer)
        try:
            return encode_prompt_messages(tokenizer, template, [*first, *messages])
        except RenderError as error:
            raise UserError(f"the chat template refuses the conversation: {error}") from error
        except ValueError as error:
            raise UserError(str(error)) from error

    def encode_message_after_answer(self, message: Mapping[str, Any]) -> np.ndarray:
        tokenizer = self._chat_tokenizer
        try:
            return encode_message_alone(
                tokenizer, self.get_or_create_chat_template(tokenizer), message, self.answer_end_ids
            )
        except ValueError as error:
            raise UserError(f"the chat template can't continue a conversation: {error}") from error

    def check_role_after_answer(self, role: str) -> None:
        try:
            ids = self.encode_message_after_answer({"role": role, "content": PROBE})
        finally:
            self.close()
        if PROBE not in self.tokenizer.decode(ids.tolist()):
            raise UserError(
                f"the chat template leaves out a message with the role {role} after an answer; use another template"
            )

    @property
    def _chat_tokenizer(self) -> ChatTokenizer:
        """The tokenizer. Raises UserError if it has no control tokens."""
        if not isinstance(self.tokenizer, ChatTokenizer):
            name = type(self.tokenizer).__name__
            text = f"the tokenizer {name} has no chat template and no control tokens"
            raise UserError(f"{text}; use a model that was trained on conversations, with its tokenizer", 2)
        return self.tokenizer
