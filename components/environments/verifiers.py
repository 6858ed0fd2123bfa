"""Environments of the package `verifiers`."""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

import attrs

from drawloom import UserError, between, component, internal, setting
from drawloom.components.distributed.json_process import JsonProcess
from drawloom.components.environments import verifiers_process
from drawloom.components.environments.tools import read_tags
from drawloom.ports import Example, Reply, Split

LOADING_SECONDS = 1800.0
"""Time limit for loading an environment, which may download its data."""


@component(needs={"verifiers": "drawloom[verifiers]"})
class VerifiersEnvironment:
    """
    Environment of the package `verifiers`: a SingleTurnEnv, MultiTurnEnv, ToolEnv or subclass; its data are examples.

    The environment's own loop waits for the policy's turns, and its rubric scores the conversation. A model calls tools
    by `<tool_call>`, as in `environments.tools`. The validation split is the evaluation data, or without any the
    training data. Every conversation has its own process, a fork of the one with the loaded environment: if the
    environment or its rubric raises, exits or takes too long, this conversation ends with a fault.
    """

    environment: str = setting("name of an installed environment, or of a module with load_environment")
    arguments: dict[str, Any] = setting("arguments of load_environment", factory=dict)
    seconds: int = setting("time limit for the environment's part of a turn", default=300, check=between(1, 10_000_001))
    _tool_schemas: list[dict[str, Any]] = internal(factory=list)
    _lock: Any = internal(factory=Lock)
    _process: JsonProcess = internal(factory=lambda: JsonProcess(verifiers_process.__file__))

    def check_before_open(self) -> None:
        """Load the environment. Raises UserError if this fails, or if its conversations can't be held."""
        self.open_pipe().close()

    def close(self) -> None:
        """Kill the process with the environment."""
        self._process.close()

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        return self._tool_schemas

    def read_before_open(self) -> Iterator[Example]:
        """Yield the environment's data, if it has any."""
        with suppress(UserError):
            yield from self.examples("train")
            yield from self.examples("validation")

    def examples(self, split: Split) -> list[Example]:
        try:
            rows = ask(self.open_pipe(), {"split": split})["rows"]
        except RuntimeError as error:
            raise UserError(f"environment: {self.environment} has no examples ({error}); connect others") from error
        return [{**row, "source": f"{self.environment}, {split} {number}"} for number, row in enumerate(rows)]

    def reset(self, example: Example) -> "VerifiersEpisode":
        pipe = self.open_pipe()
        answer = ask(pipe, {"example": {"example_id": 0, **example}, "seconds": self.seconds})
        if answer.get("role") != "":
            raise RuntimeError("the environment adds to the prompt, or ends before the first turn")
        return VerifiersEpisode(pipe)

    def open_pipe(self) -> Connection:
        """Return a pipe to a new fork. Raises UserError if the environment can't be loaded."""
        with self._lock:
            if not self._process.is_running:
                request = {"path": sys.path, "environment": self.environment, "arguments": self.arguments}
                try:
                    answer = self._process.ask(request, LOADING_SECONDS)
                except (EOFError, TimeoutError) as error:
                    answer = {"error": error}
                if "error" in answer:
                    self._process.close()
                    raise UserError(f"environment: {self.environment} can't be used: {answer['error']}")
                self._tool_schemas = [{"type": "function", "function": tool} for tool in answer["tools"]]
            return self._process.open_pipe()


@attrs.frozen(eq=False)
class VerifiersEpisode:
    """Conversation with an environment, in a fork of its process."""

    pipe: Connection

    def step(self, text: str) -> Reply:
        """Send a turn, and return the environment's message or reward. Raises RuntimeError for its exception."""
        calls = [*read_tags(text)]
        faults = ["malformed_call" for call in calls if not call.name]
        tool_calls = [
            {"id": f"{number}", "name": f"{call.name}", "arguments": json.dumps(call.arguments) if call.name else ""}
            for number, call in enumerate(calls)
        ]
        turn = {"content": text, "tool_calls": tool_calls or None, "finish_reason": "stop", "is_truncated": False}
        answer = ask(self.pipe, turn)
        if answer.get("role") == "":
            raise RuntimeError("the environment adds no message after a turn")
        return Reply(answer.pop("message", ""), is_done="reward" in answer, faults=faults, **answer)


def ask(pipe: Connection, request: dict[str, Any]) -> Any:
    """Send a request to a fork, and return its answer. Raises RuntimeError for its exception, or if it has died."""
    try:
        pipe.send(request)
        answer = pipe.recv()
    except (EOFError, OSError):
        answer = {"error": "the environment's process died, such as at the limit of `seconds`"}
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer
