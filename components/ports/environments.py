"""Ports for conversations of several turns with an environment, such as tools that a model calls."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from drawloom.components.ports.data import Example
from drawloom.graph import port

FAULTS = (
    "malformed_call",
    "unknown_tool",
    "tool_error",
    "tool_timeout",
    "tool_output",
    "environment_error",
    "max_turns",
    "max_tokens",
)
"""Kinds of faults in a conversation, in the order of `Completions.faults`."""


@attrs.frozen
class Reply:
    """
    Reply of an environment to a turn: its message, a reward or None, and whether the conversation is over.

    `role` is the message's role in a chat template, and `faults` are kinds in FAULTS, one for every fault in the turn.
    """

    message: str
    reward: float | None = None
    is_done: bool = False
    faults: Sequence[str] = ()
    role: str = "user"


class Episode(Protocol):
    """A conversation. It is only used by one thread at a time."""

    def step(self, text: str) -> Reply:
        """Reply to a turn, given without its end token."""
        ...


@port
class Environment(Protocol):
    """What a model talks to in its turns; an example's prompt is the first message."""

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the functions that a model may call, for chat templates; often none."""
        ...

    def reset(self, example: Example) -> Episode:
        """
        Start a conversation about an example. It has no random numbers except for those derived from the example.

        Called from several threads. Raises UserError for an example that it can't use.
        """
        ...


@port
class Tool(Protocol):
    """A function that a model can call, with JSON values as arguments."""

    @property
    def function(self) -> Callable[..., object]:
        """The function, whose file is imported again by the process that runs it."""
        ...

    @property
    def tool_schema(self) -> Mapping[str, Any]:
        """JSON schema of the function, as chat templates expect it. Raises ValueError for an unusable signature."""
        ...
