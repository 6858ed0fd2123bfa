"""Renders conversations by a chat template, in a process that is bounded in memory and time."""

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
from drawloom.graph import UserError

SECONDS = 10.0
"""For all renderings of a conversation; ordinary ones take a millisecond each."""


class RenderError(ValueError):
    """A conversation that a template does not render; the message is the template's reason."""


@attrs.define(eq=False)
class ChatTemplate:
    """
    A template in a process of its own; `special_tokens` are its variables, such as bos_token.

    Without a `text` nothing can be rendered. `date`, as 2025-01-31, is what a template gets that asks for today's date.
    """

    text: str | None
    special_tokens: Mapping[str, str] = attrs.field(factory=dict)
    date: str | None = None
    seconds: float = SECONDS
    _process: Any = attrs.field(init=False, default=None)
    _buffer: bytes = attrs.field(init=False, default=b"")

    def open(self) -> None:
        """Start the process, as the first rendering does otherwise. Raises UserError for a template that is none."""
        if self.text is None:
            instead = (
                'write template = "chat.jinja", a file that has one, or take a model that was trained on conversations'
            )
            raise UserError(f"template: the tokenizer has no chat template; {instead}")
        if importlib.util.find_spec("jinja2") is None:
            raise UserError("chat templates need the package jinja2; pip install 'drawloom[chat]'")
        # -I: neither the environment nor the current directory has a say in what it imports.
        command = [sys.executable, "-I", render_process.__file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        os.set_blocking(self._process.stdout.fileno(), False)
        opening = {"template": self.text, "special_tokens": dict(self.special_tokens), "date": self.date}
        answer = self._ask(opening, 60.0)
        if "error" in answer:
            self.close()
            raise UserError(f"the chat template can't be read: {answer['error']}; take that of the model's tokenizer")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def render(self, requests: Sequence[Mapping[str, Any]]) -> list[str]:
        """
        A text for each request: `messages`, and as needed `tools` and `add_generation_prompt`.

        Raises RenderError with the template's reason, and UserError if it takes too long.
        """
        if self._process is None:
            self.open()
        answers = self._ask(requests, self.seconds)
        for answer in answers:
            if "error" in answer:
                raise RenderError(answer["error"])
        return [answer["text"] for answer in answers]

    def _ask(self, request: Any, seconds: float) -> Any:
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            return json.loads(self._line(time.monotonic() + seconds))
        except (BrokenPipeError, EOFError) as error:
            self.close()
            raise UserError("the process that renders the chat template has died; use another template") from error
        except TimeoutError as error:
            self.close()
            what = f"the chat template takes more than {seconds:g} s for a conversation"
            raise UserError(f"{what}; use another template") from error

    def _line(self, deadline: float) -> bytes:
        stream = self._process.stdout
        while b"\n" not in self._buffer:
            if not select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            if not (read := stream.read(2**20)):
                raise EOFError
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def template_of(folder: Path) -> tuple[str | None, dict[str, str]]:
    """The chat template in a tokenizer's folder, None if it has none, and its special tokens by name."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        config = {}
    file = folder / "chat_template.jinja"
    template = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several by name, of which the default is for conversations
        template = {each.get("name"): each.get("template") for each in template}.get("default")
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return template, tokens
