"""Environment for a model that calls tools, until it answers without a call."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import getfile, signature
from queue import Queue
from typing import Any, Literal

import attrs

from drawloom import NodeView, Ordered, Problem, UserError, above, between, component, internal, setting
from drawloom.components.distributed.json_process import JsonProcess
from drawloom.components.environments import tool_process
from drawloom.ports import Example, Reply, Tool

TAGS = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
# The second alternative matches an unclosed or malformed call.
BRACKETS = re.compile(r"\[(?:(\w+) (.*?)\]|.*)", re.DOTALL)
FORMS = {"tags": '<tool_call>{"name": ..., "arguments": {...}}</tool_call>', "brackets": "[name argument]"}
"""Calls as a message to a model shows them."""

GRACE = 60.0
"""Seconds beyond a tool's limit, and for importing the tools."""


@attrs.frozen
class ToolCall:
    """A call in a model's text; the name is None if the call can't be read."""

    name: str | None
    arguments: Any


@attrs.frozen
class ToolResult:
    """Text for the model after a call, and the fault's kind or None."""

    text: str
    fault: str | None = None


def read_tags(text: str) -> Iterator[ToolCall]:
    """Yield the calls between tags in a text."""
    for match in TAGS.finditer(text):
        try:
            call = json.loads(match[1])
            yield ToolCall(call["name"], call.get("arguments", {}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            yield ToolCall(None, None)


@component
class ToolEnvironment:
    """
    Tools for a model: a turn's calls are answered by their results, and a turn without a call ends the conversation.

    With `calls = "tags"` a call is JSON between `<tool_call>` and `</tool_call>`, as Qwen and Hermes write it; with
    "brackets" it is `[name argument]`, short enough for small models, with one text. Calls run in processes with
    limited time, memory and output; after a failing, unknown or malformed call the model reads a short message
    beginning with "error:". This contains mistakes, not attacks: a tool can read the user's files, and reach the
    network.
    """

    tools: Ordered[Tool]
    calls: Literal["tags", "brackets"] = setting("how a model writes calls", default="tags")
    seconds: float = setting("time limit for a call", default=5.0, check=above(0))
    memory: float = setting("memory limit for a call, beside the imported tools, in GB", default=0.5, check=above(0))
    characters: int = setting("longest result; a longer one is cut", default=2000, check=between(1, 10_000_001))
    processes: int = setting("calls at the same time", default=2, check=between(1, 1025), impact="safe")
    _functions: Mapping[str, Callable[..., object]] = internal(factory=dict)
    _idle: "Queue[JsonProcess]" = internal(factory=Queue)
    _has_imported: bool = internal(False)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report an environment without tools."""
        if not node.neighbours("tools"):
            yield node.problem("tools", "there is no tool to call", 'write tools = ["@calculator"]')

    def open(self) -> None:
        """Collect the tools; their processes start with the first call."""
        self._functions = {tool.function.__name__: tool.function for tool in self.tools}
        if len(self._functions) != len(self.tools):
            raise UserError(f"tools: two functions have one name, of {', '.join(self._functions)}; rename one", 2)
        for _ in range(self.processes):
            self._idle.put(JsonProcess(tool_process.__file__))

    def close(self) -> None:
        """Kill the idle processes."""
        while not self._idle.empty():
            self._idle.get().close()

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        return [tool.tool_schema for tool in self.tools]

    def reset(self, example: Example) -> "ToolEnvironment":
        """Return this environment: calls leave nothing behind."""
        return self

    def step(self, text: str) -> Reply:
        """Run a turn's calls, in order."""
        calls = [*self._read_calls(text)]
        results = [self._run_call(call) for call in calls]
        message = "".join(f"{result.text}\n" for result in results)
        faults = [result.fault for result in results if result.fault]
        return Reply(message, is_done=not calls, faults=faults, role="tool")

    def _read_calls(self, text: str) -> Iterator[ToolCall]:
        """
        Yield a text's calls; a bracket call's text becomes its function's first argument, and an unreadable call has no
        name.
        """
        if self.calls == "brackets":
            for match in BRACKETS.finditer(text):
                parameters = [*signature(self._functions[match[1]]).parameters] if match[1] in self._functions else []
                yield ToolCall(match[1], dict.fromkeys(parameters[:1], match[2]))
        else:
            yield from read_tags(text)

    def _run_call(self, call: ToolCall) -> ToolResult:
        """Return a call's result, or a message with its fault."""
        if not isinstance(call.name, str) or not isinstance(call.arguments, dict):
            return ToolResult(f"error: write {FORMS[self.calls]}", "malformed_call")
        if call.name not in self._functions:
            return ToolResult(f"error: the tools are {', '.join(self._functions)}", "unknown_tool")
        try:
            signature(self._functions[call.name]).bind(**call.arguments)
        except TypeError as error:
            return ToolResult(f"error: {error}", "malformed_call")
        limits = {"seconds": self.seconds, "bytes": round(self.memory * 1e9), "characters": self.characters}
        answer = self._ask_process({"tool": call.name, "arguments": call.arguments, **limits})
        if "timeout" in answer:
            return ToolResult(f"error: no result within {self.seconds:g} s", "tool_timeout")
        if "error" in answer:
            return ToolResult(f"error: {answer['error']}", "tool_error")
        if answer["characters"] > self.characters:
            text = f"{answer['text']}\nerror: cut after {self.characters} of {answer['characters']} characters"
            return ToolResult(text, "tool_output")
        return ToolResult(answer["text"])

    def _ask_process(self, request: Mapping[str, Any]) -> Any:
        """Send a call to an idle process. If it dies, the call has an error, and another process starts."""
        process = self._idle.get()
        try:
            if not process.is_running and (fault := self._import_tools(process)):
                return {"error": fault}
            return process.ask(request, self.seconds + GRACE)
        except (EOFError, TimeoutError):
            return {"error": "the process for tools died"}
        finally:
            self._idle.put(process)

    def _import_tools(self, process: JsonProcess) -> str | None:
        """Let a process import the tools, and return its fault. Raises UserError if no process has imported them."""
        sources = {name: getfile(function) for name, function in self._functions.items()}
        answer = process.ask({"path": sys.path, "tools": sources}, GRACE)
        if "error" not in answer:
            self._has_imported = True
            return None
        process.close()
        fault = f"the tools {', '.join(sources)} can't be imported again: {answer['error']}"
        if not self._has_imported:
            raise UserError(fault)
        return fault
