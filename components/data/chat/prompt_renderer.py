"""Base class for components that render prompts by a chat template."""

import datetime
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.data.chat.template import ChatTemplate
from drawloom.components.ports.corpus import ChatTokenizer, Tokenizer
from drawloom.graph import UserError, component_base_class, setting


@component_base_class
class PromptRenderer:
    """Base with a chat template, from the tokenizer or a file; its renderer is a process, started once."""

    tokenizer: Tokenizer
    template: Path | None = setting(
        default=None, doc="file with a jinja2 chat template; default: the tokenizer's template"
    )
    date: datetime.date | None = setting(
        default=None, doc="date for templates with today's date, such as 2025-01-31; without it they fail"
    )
    _renderer: ChatTemplate | None = attrs.field(init=False, default=None)

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
            date = None if self.date is None else f"{self.date}"
            self._renderer = ChatTemplate(self._read_template(tokenizer), tokenizer.special_tokens_by_name, date)
        return self._renderer

    def _read_template(self, tokenizer: ChatTokenizer) -> str | None:
        """Return the template's text. Raises UserError if the file can't be read."""
        if self.template is None:
            return tokenizer.chat_template
        try:
            return self.template.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"template: {self.template} can't be read ({error}); name a jinja2 file", 2) from error

    def __getstate__(self) -> dict[str, Any]:
        """Return what worker processes need; each starts a renderer of its own."""
        return {**self.__dict__, "_renderer": None}
