"""Chat template renderer, in a process with limited memory and time."""

import datetime
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.data.chat import render_process
from drawloom.components.ports.corpus import ChatTokenizer
from drawloom.graph import UserError

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
    _process: Any = attrs.field(init=False, default=None)
    _buffer: bytes = attrs.field(init=False, default=b"")

    def open(self) -> None:
        """Start the process, if no rendering has started it. Raises UserError if the template is invalid."""
        if not self.texts:
            remedy = (
                'write template = "chat.jinja", a file that has one, or take a model that was trained on conversations'
            )
            raise UserError(f"template: the tokenizer has no chat template; {remedy}")
        if importlib.util.find_spec("jinja2") is None:
            raise UserError("chat templates need the package jinja2; pip install 'drawloom[chat]'")
        # -I: neither the environment nor the current directory can change its imports.
        command = [sys.executable, "-I", render_process.__file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        os.set_blocking(self._process.stdout.fileno(), False)
        opening = {"templates": dict(self.texts), "special_tokens": dict(self.special_tokens), "date": self.date}
        answer = self._send_request_and_wait_for_answer(opening, 60.0)
        if "error" in answer:
            self.close()
            raise UserError(
                f"the chat template can't be read: {answer['error']}; use the chat template in the model's tokenizer"
            )

    @property
    def has_rendered(self) -> bool:
        """Whether the process is running: it starts at the first rendering."""
        return self._process is not None

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def render(self, requests: Sequence[Mapping[str, Any]]) -> list[str]:
        """
        Return texts by request: `messages`, and optionally `tools` and `add_generation_prompt`.

        Raises RenderError with the template's reason, and UserError if it takes too long.
        """
        if self._process is None:
            self.open()
        answers = self._send_request_and_wait_for_answer(requests, self.seconds)
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

    def _send_request_and_wait_for_answer(self, request: Any, seconds: float) -> Any:
        """
        Send a request to the process, and return its answer. Raises UserError if it dies, or takes over `seconds`.
        """
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            return json.loads(self._read_answer_line(time.monotonic() + seconds))
        except (BrokenPipeError, EOFError) as error:
            self.close()
            raise UserError("the process that renders the chat template has died; use another template") from error
        except TimeoutError as error:
            self.close()
            text = f"the chat template takes more than {seconds:g} s for a conversation; use another template"
            raise UserError(text) from error

    def _read_answer_line(self, deadline: float) -> bytes:
        """
        Read a line from the process, until `deadline` (time.monotonic). Raises TimeoutError, or EOFError if it ends.
        """
        stream = self._process.stdout
        while b"\n" not in self._buffer:
            if not select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            if not (read := stream.read(2**20)):
                raise EOFError
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


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


def read_chat_templates_and_special_tokens(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the chat templates in a tokenizer folder, and the special tokens, both by name."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        config = {}
    # As in transformers, files replace the templates in the configuration.
    templates = {
        "default" if file.parent == folder else file.stem: file.read_text("utf-8")
        for file in list_chat_template_files(folder)
    }
    if not templates and isinstance(declared := config.get("chat_template"), str):
        templates = {"default": declared}
    elif not templates and isinstance(declared, list):
        templates = {entry["name"]: entry["template"] for entry in declared}
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return templates, tokens
