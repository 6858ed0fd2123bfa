"""
Process for rendering chat templates like transformers, with limited memory.

A template is untrusted data. Jinja2's sandbox keeps it from Python, but bounds neither memory nor time: this
process bounds memory, its parent bounds time. The input is JSON: first the templates by name, their special tokens and
their date, then rendering lists. This file is run by its path and imports neither drawloom nor torch.
"""

import json
import re
import resource
import sys
from contextlib import suppress
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any

MAX_MEMORY = 2**29
"""Bytes of address space."""

MAX_TEXT = 2**24
"""Characters in one rendering."""


REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message for the thoughts before its content."""


def create_sandboxed_environment(date: str | None) -> Any:
    """Return a sandboxed environment with transformers' globals and filters, and no loader."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Tag `{% generation %}`, an answer mark for transformers, which renders its content unchanged."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            """Parse the content as ordinary statements."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        """Reject the conversation with a template's message."""
        raise jinja2.exceptions.TemplateError(message)

    def strftime_now(form: str) -> str:
        """Format the date given by the user, because today's date would make runs differ."""
        if date is None:
            raise jinja2.exceptions.TemplateError("it needs today's date; write date = 2025-01-31, for example")
        return datetime.fromisoformat(date).strftime(form)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        """Encode JSON without escaping HTML characters, like transformers and unlike jinja2."""
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    class Namespace(jinja2.utils.Namespace):
        """Namespace that refuses attributes with a leading underscore, because they would lead into Python."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(
                    f"the namespace attribute {name!r} begins with an underscore; give it another name"
                )
            super().__setitem__(name, value)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now, "namespace": Namespace}
    return sandbox


def prepare_message_like_transformers(message: dict[str, Any]) -> dict[str, Any]:
    """Drop keys with null, and copy the reasoning to its names in templates, like `apply_chat_template`."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[key] for key in REASONING if key in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def render_request(
    templates: dict[str, Any], request: dict[str, Any], special_tokens: dict[str, str]
) -> dict[str, str]:
    """
    Render a request, with the template `tool_use`, if there is one, for a request with tools.

    Return {"text": ...}, or {"error": ...} with the reason for a failure.
    """
    has_tools = request.get("tools") is not None
    template = templates.get("tool_use" if has_tools and "tool_use" in templates else "default")
    if template is None:
        return {"error": f"none of its templates, {', '.join(templates)}, is named default"}
    try:
        messages = [prepare_message_like_transformers(message) for message in request["messages"]]
        text = template.render(**special_tokens, documents=None, **{**request, "messages": messages})
    except MemoryError:
        return {"error": f"it takes more than {MAX_MEMORY >> 20} MiB"}
    except Exception as error:  # a template can raise anything
        return {"error": re.sub(r"\s+", " ", f"{error}")[:500] or type(error).__name__}
    if len(text) > MAX_TEXT:
        return {"error": f"it renders {len(text)} characters, more than {MAX_TEXT}"}
    return {"text": text}


def serve_rendering_requests(pipe: Connection) -> None:
    """Read the templates and confirm them, or answer with an error; then answer rendering lists until the end."""
    opening = json.loads(pipe.recv_bytes())
    try:
        sandbox = create_sandboxed_environment(opening["date"])
        templates = {name: sandbox.from_string(text) for name, text in opening["templates"].items()}
        answer: Any = {"ready": True}
    except Exception as error:  # a template can raise anything when it is parsed
        answer = {"error": f"{error}"[:500]}
    with suppress(EOFError):
        while True:
            pipe.send_bytes(json.dumps(answer).encode())
            requests = json.loads(pipe.recv_bytes())
            answer = [render_request(templates, request, opening["special_tokens"]) for request in requests]


if __name__ == "__main__":
    import jinja2.sandbox  # noqa: F401 - before the limit, which is meant for the template

    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    serve_rendering_requests(Connection(int(sys.argv[1])))
