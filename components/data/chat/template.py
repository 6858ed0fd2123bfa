"""Chat template renderer, in a process with limited memory and time."""

import datetime
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from drawloom import UserError
from drawloom.components.data.auto_tokenizer import CONFIG, read_json_object_or_empty
from drawloom.components.data.chat import render_process
from drawloom.components.distributed.json_process import JsonProcess
from drawloom.ports import ChatTokenizer

TIMEOUT = 10.0
"""Seconds for all renderings of a conversation; each usually takes a millisecond."""


class RenderError(ValueError):
    """A conversation that the template rejects; the message is its reason."""


@attrs.define(eq=False)
class ChatTemplate:
    """
    Chat template, rendered in a child process; `special_tokens` are its variables, such as bos_token.

    `texts` are by name: `tool_use` renders requests with tools, and `default` all others. Without any, the first
    rendering raises an error. `date`, such as 2025-01-31, is for templates with today's date.
    """

    texts: Mapping[str, str]
    special_tokens: Mapping[str, str] = attrs.field(factory=dict)
    date: str | None = None
    seconds: float = TIMEOUT
    _process: JsonProcess = attrs.field(init=False, factory=lambda: JsonProcess(render_process.__file__))

    def open(self) -> None:
        """Start the process, if no rendering has started it. Raises UserError if the template is invalid."""
        if not self.texts:
            remedy = (
                'write template = "chat.jinja", a file that has one, or take a model that was trained on conversations'
            )
            raise UserError(f"template: the tokenizer has no chat template; {remedy}")
        if importlib.util.find_spec("jinja2") is None:
            raise UserError("chat templates need the package jinja2; pip install 'drawloom[chat]'")
        opening = {"templates": dict(self.texts), "special_tokens": dict(self.special_tokens), "date": self.date}
        answer = self._ask(opening, 60.0)
        if "error" in answer:
            self.close()
            raise UserError(
                f"the chat template can't be read: {answer['error']}; use the chat template in the model's tokenizer"
            )

    @property
    def has_rendered(self) -> bool:
        """Whether the process is running: it starts at the first rendering."""
        return self._process.is_running

    def close(self) -> None:
        """Kill the process."""
        self._process.close()

    def render(self, requests: Sequence[Mapping[str, Any]]) -> list[str]:
        """
        Return texts by request: `messages`, and optionally `tools` and `add_generation_prompt`.

        Raises RenderError with the template's reason, and UserError if it takes too long.
        """
        if not self.has_rendered:
            self.open()
        answers = self._ask(requests, self.seconds)
        for answer in answers:
            if "error" in answer:
                raise RenderError(answer["error"])
        return [answer["text"] for answer in answers]

    def render_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, prompt: bool = False
    ) -> str:
        """Return one request's text."""
        (text,) = self.render([make_request(messages, tools, prompt)])
        return text

    def _ask(self, request: Any, seconds: float) -> Any:
        """
        Send a request to the process, and return its answer. Raises UserError if it dies, or takes over `seconds`.
        """
        try:
            return self._process.ask(request, seconds)
        except EOFError as error:
            raise UserError("the process that renders the chat template has died; use another template") from error
        except TimeoutError as error:
            text = f"the chat template takes more than {seconds:g} s for a conversation; use another template"
            raise UserError(text) from error


def make_request(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, prompt: bool = False
) -> dict[str, Any]:
    """Return a request for `ChatTemplate.render`; with `prompt`, the text goes on to an answer's beginning."""
    return {"messages": list(messages), "tools": tools, "add_generation_prompt": prompt}


def create_chat_template(
    tokenizer: ChatTokenizer, file: Path | None, date: datetime.date | None = None
) -> ChatTemplate:
    """Return a renderer for the template in a file, or for the tokenizer's. Raises UserError for an unreadable file."""
    texts = tokenizer.chat_templates
    if file is not None:
        try:
            texts = {"default": file.read_text("utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"template: {file} can't be read ({error}); name a jinja2 file", 2) from error
    return ChatTemplate(texts, tokenizer.special_tokens_by_name, None if date is None else str(date))


def list_chat_template_files(folder: Path) -> list[Path]:
    """Return the files with chat templates in a tokenizer folder."""
    files = [folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    return [file for file in files if file.is_file()]


def read_chat_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates in a tokenizer folder by name: its files, or else the configuration's."""
    if files := list_chat_template_files(folder):
        return {"default" if file.parent == folder else file.stem: file.read_text("utf-8") for file in files}
    declared = read_json_object_or_empty(folder / CONFIG).get("chat_template")
    if isinstance(declared, list):
        return {entry["name"]: entry["template"] for entry in declared}
    return {"default": declared} if isinstance(declared, str) else {}
