"""Ports for conversations with an environment, such as tools for a model."""

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
"""Faults in a conversation, ordered as `Completions.faults`."""


@attrs.frozen
class Reply:
    """
    An environment's reply to a turn: its message, a reward or None, and whether the conversation is over.

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


@port
class Environment(Protocol):
    """Partner for a model's turns; an example's prompt is the first message."""

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas for chat templates, by function; often none."""

    def reset(self, example: Example) -> Episode:
        """
        Start a conversation about an example. Random numbers derive from the example alone.

        Called from several threads. Raises UserError for an unsuitable example.
        """


@port
class Tool(Protocol):
    """A function for a model to call, with JSON values as arguments."""

    @property
    def function(self) -> Callable[..., object]:
        """The function; its file is imported again by the process for tools."""

    @property
    def tool_schema(self) -> Mapping[str, Any]:
        """The function's JSON schema, as chat templates expect it. Raises ValueError for an unusable signature."""
