"""Base class for components that render prompts by a chat template."""

import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from drawloom import UserError, internal, setting
from drawloom.components.data.chat.template import ChatTemplate, create_chat_template
from drawloom.components.data.chat.turns import find_turn_end_ids
from drawloom.graph import component_base_class
from drawloom.ports import ChatTokenizer, Tokenizer, find_end_ids


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
